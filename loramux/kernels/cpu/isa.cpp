#include "isa.h"

#include <algorithm>

#if defined(LORAMUX_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace loramux {

#if defined(LORAMUX_X86) && defined(__linux__)
// The kernel gives a process its tiles when asked.
static bool has_amx() {
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE)) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#elif defined(LORAMUX_X86)
static bool has_amx() { return false; }
#endif

static std::vector<Isa> detect() {
    std::vector<Isa> isas{Isa::SCALAR};
#ifdef LORAMUX_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isas.push_back(Isa::AVX2);
    if (__builtin_cpu_supports("avx512f")) isas.push_back(Isa::AVX512);
    if (__builtin_cpu_supports("avx512bf16")) isas.push_back(Isa::AVX512_BF16);
    if (isas.back() == Isa::AVX512_BF16 && has_amx()) isas.push_back(Isa::AMX);
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
