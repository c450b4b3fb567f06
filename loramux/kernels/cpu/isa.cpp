#include "isa.h"

#include <algorithm>

namespace loramux {

static std::vector<Isa> detect() {
    std::vector<Isa> isas{Isa::SCALAR};
#ifdef LORAMUX_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isas.push_back(Isa::AVX2);
    if (__builtin_cpu_supports("avx512f")) isas.push_back(Isa::AVX512);
    if (__builtin_cpu_supports("avx512bf16")) isas.push_back(Isa::AVX512_BF16);
#endif
    return isas;
}

const std::vector<Isa>& supported_isas() {
    static const std::vector<Isa> isas = detect();
    return isas;
}

bool is_supported(Isa isa) {
    const auto& isas = supported_isas();
    return std::find(isas.begin(), isas.end(), isa) != isas.end();
}

}  // namespace loramux
