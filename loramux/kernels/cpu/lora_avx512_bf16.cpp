#include "lora_avx512.h"

namespace loramux {

namespace {

// Dot products of bfloat16 in one instruction, which adds both products of a pair to a float32 lane.
struct Avx512Bfloat16Dot : Avx512Bfloat16 {
    using Factor = __m512bh;

    static Factor load_factor(const uint16_t* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }

    static Register dot(Register sum, Factor x, Factor a) { return _mm512_dpbf16_ps(sum, x, a); }
};

}  // namespace

LoraKernel lora_avx512_bf16(LoraDtype dtype) { return kernel_for<Avx512Float32, Avx512Bfloat16Dot>(dtype); }

}  // namespace loramux
