// The instruction sets a native operation may be compiled for. Every machine runs SCALAR.
#pragma once

#include <vector>

#if defined(__x86_64__)
#define LORAMUX_X86 1
#define LORAMUX_TARGET(isa) __attribute__((target(isa)))
#endif

namespace loramux {

// AVX2 comes with FMA, each of the others with those before it. AMX is AMX-BF16.
enum class Isa { SCALAR, AVX2, AVX512, AVX512_BF16, AMX };

// What this machine runs, slowest first.
const std::vector<Isa>& supported_isas();

bool is_supported(Isa isa);

}  // namespace loramux
