#include <immintrin.h>

#include "lora_tiles.h"

namespace loramux {

namespace {

struct Avx2 {
    using Register = __m256;

    static Register all(float value) { return _mm256_set1_ps(value); }

    static Register add(Register p, Register q) { return _mm256_add_ps(p, q); }

    static Register multiply_add(Register p, Register q, Register sum) { return _mm256_fmadd_ps(p, q, sum); }

    static float total(Register sum) {
        __m128 part = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
        part = _mm_add_ps(part, _mm_movehl_ps(part, part));
        return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
    }
};

struct Avx2Float32 : Avx2 {
    using Element = float;
    using Factor = __m256;
    static constexpr int WIDTH = 8, SHRINK_ROWS = 2, SHRINK_RANKS = 4;
    static constexpr int COLUMNS = 16, REGISTERS = 2, EXPAND_ROWS = 6;

    // Kept in its register: GCC would read it from memory again for each product, and the loads would take longer than the products.
    static Factor load_factor(const float* from) {
        Factor factor = _mm256_loadu_ps(from);
        asm("" : "+x"(factor));
        return factor;
    }

    static Register dot(Register sum, Factor x, Factor a) { return _mm256_fmadd_ps(x, a, sum); }

    static void load(const float* from, Register (&to)[REGISTERS]) {
        for (int k = 0; k < REGISTERS; ++k) to[k] = _mm256_loadu_ps(from + 8 * k);
    }

    static void store(float* to, const Register (&from)[REGISTERS]) {
        for (int k = 0; k < REGISTERS; ++k) _mm256_storeu_ps(to + 8 * k, from[k]);
    }
};

// Sixteen elements are two registers, the even ones and the odd ones: a shift and a mask widen them.
struct Avx2Bfloat16 : Avx2 {
    using Element = uint16_t;
    struct Factor {
        __m256 even, odd;
    };
    static constexpr int WIDTH = 16, SHRINK_ROWS = 2, SHRINK_RANKS = 4;
    static constexpr int COLUMNS = 32, REGISTERS = 4, EXPAND_ROWS = 3;

    static Factor load_factor(const uint16_t* from) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(_mm256_and_si256(pairs, upper_halves()))};
    }

    static Register dot(Register sum, Factor x, Factor a) {
        return _mm256_fmadd_ps(x.odd, a.odd, _mm256_fmadd_ps(x.even, a.even, sum));
    }

    static void load(const uint16_t* from, Register (&to)[REGISTERS]) {
        for (int k = 0; k < REGISTERS; k += 2) {
            const Factor pairs = load_factor(from + 8 * k);
            to[k] = pairs.even;
            to[k + 1] = pairs.odd;
        }
    }

    static void load(const float* from, Register (&to)[REGISTERS]) {
        for (int k = 0; k < REGISTERS; k += 2) {
            const __m256 low = _mm256_loadu_ps(from + 8 * k), high = _mm256_loadu_ps(from + 8 * k + 8);
            to[k] = in_order(_mm256_shuffle_ps(low, high, 0x88));
            to[k + 1] = in_order(_mm256_shuffle_ps(low, high, 0xdd));
        }
    }

    static void store(uint16_t* to, const Register (&from)[REGISTERS]) {
        for (int k = 0; k < REGISTERS; k += 2) {
            const __m256i even = _mm256_srli_epi32(rounded(from[k]), 16);
            const __m256i odd = _mm256_and_si256(rounded(from[k + 1]), upper_halves());
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * k), _mm256_or_si256(even, odd));
        }
    }

   private:
    static __m256i upper_halves() { return _mm256_set1_epi32(static_cast<int>(0xffff0000u)); }

    static __m256 in_order(__m256 quarters) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(quarters), 0xd8)); }

    // To nearest even in the upper half of each element; NaN stays NaN.
    static __m256i rounded(__m256 values) {
        const __m256i bits = _mm256_castps_si256(values);
        const __m256i last_kept = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i number = _mm256_add_epi32(bits, _mm256_add_epi32(last_kept, _mm256_set1_epi32(0x7fff)));
        const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
        return _mm256_blendv_epi8(number, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(is_nan));
    }
};

}  // namespace

LoraKernel lora_avx2(LoraDtype dtype) { return kernel_for<Avx2Float32, Avx2Bfloat16>(dtype); }

}  // namespace loramux
