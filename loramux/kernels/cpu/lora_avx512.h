// Vectors of AVX-512F, for `lora_tiles.h`.
#pragma once

#include <immintrin.h>

#include "lora_tiles.h"

namespace loramux {

namespace {

struct Avx512 {
    using Register = __m512;

    static Register all(float value) { return _mm512_set1_ps(value); }

    static Register add(Register p, Register q) { return _mm512_add_ps(p, q); }

    static Register multiply_add(Register p, Register q, Register sum) { return _mm512_fmadd_ps(p, q, sum); }

    static float total(Register sum) { return _mm512_reduce_add_ps(sum); }
};

struct Avx512Float32 : Avx512 {
    using Element = float;
    using Factor = __m512;
    static constexpr int WIDTH = 16, SHRINK_ROWS = 4, SHRINK_RANKS = 4;
    static constexpr int COLUMNS = 32, REGISTERS = 2, EXPAND_ROWS = 8;

    // Kept in its register: GCC would read it from memory again for each product, and the loads would take longer than the products.
    static Factor load_factor(const float* from) {
        Factor factor = _mm512_loadu_ps(from);
        asm("" : "+v"(factor));
        return factor;
    }

    static Register dot(Register sum, Factor x, Factor a) { return _mm512_fmadd_ps(x, a, sum); }

    static void load(const float* from, Register (&to)[REGISTERS]) {
        for (int k = 0; k < REGISTERS; ++k) to[k] = _mm512_loadu_ps(from + 16 * k);
    }

    static void store(float* to, const Register (&from)[REGISTERS]) {
        for (int k = 0; k < REGISTERS; ++k) _mm512_storeu_ps(to + 16 * k, from[k]);
    }
};

// 32 elements are two registers, the even ones and the odd ones: a shift and a mask widen them.
struct Avx512Bfloat16 : Avx512 {
    using Element = uint16_t;
    struct Factor {
        __m512 even, odd;
    };
    static constexpr int WIDTH = 32, SHRINK_ROWS = 4, SHRINK_RANKS = 4;
    static constexpr int COLUMNS = 32, REGISTERS = 2, EXPAND_ROWS = 8;

    static Factor load_factor(const uint16_t* from) {
        const __m512i pairs = _mm512_loadu_si512(from);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), _mm512_castsi512_ps(_mm512_and_si512(pairs, upper_halves()))};
    }

    static Register dot(Register sum, Factor x, Factor a) {
        return _mm512_fmadd_ps(x.odd, a.odd, _mm512_fmadd_ps(x.even, a.even, sum));
    }

    static void load(const uint16_t* from, Register (&to)[REGISTERS]) {
        const Factor pairs = load_factor(from);
        to[0] = pairs.even;
        to[1] = pairs.odd;
    }

    static void load(const float* from, Register (&to)[REGISTERS]) {
        const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        to[0] = _mm512_permutex2var_ps(low, even, high);
        to[1] = _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
    }

    static void store(uint16_t* to, const Register (&from)[REGISTERS]) {
        const __m512i even = _mm512_srli_epi32(rounded(from[0]), 16);
        const __m512i odd = _mm512_and_si512(rounded(from[1]), upper_halves());
        _mm512_storeu_si512(to, _mm512_or_si512(even, odd));
    }

   private:
    static __m512i upper_halves() { return _mm512_set1_epi32(static_cast<int>(0xffff0000u)); }

    // To nearest even in the upper half of each element; NaN stays NaN.
    static __m512i rounded(__m512 values) {
        const __m512i bits = _mm512_castps_si512(values);
        const __m512i last_kept = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i number = _mm512_add_epi32(bits, _mm512_add_epi32(last_kept, _mm512_set1_epi32(0x7fff)));
        return _mm512_mask_mov_epi32(number, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    }
};

}  // namespace

}  // namespace loramux
