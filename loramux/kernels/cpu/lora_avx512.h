// Vectors of AVX-512F, for `lora_tiles.h`.
#pragma once

#include <immintrin.h>

#include "lora_tiles.h"

namespace loramux {

namespace {

struct Avx512 {
    static constexpr int WIDTH = 32;
    static constexpr int SHRINK_ROWS = 4;
    static constexpr int SHRINK_RANKS = 4;
    static constexpr int EXPAND_ROWS = 8;

    using Sum = __m512;
    struct Lanes {
        __m512 first, second;
    };
    using Factor = Lanes;

    static Sum dot(Sum sum, const Factor& x, const Factor& a) {
        return _mm512_fmadd_ps(x.second, a.second, _mm512_fmadd_ps(x.first, a.first, sum));
    }

    static float total(Sum sum) { return _mm512_reduce_add_ps(sum); }

    static Lanes all(float value) { return {_mm512_set1_ps(value), _mm512_set1_ps(value)}; }

    static Lanes add(const Lanes& p, const Lanes& q) { return {_mm512_add_ps(p.first, q.first), _mm512_add_ps(p.second, q.second)}; }

    static Lanes multiply_add(const Lanes& p, const Lanes& q, const Lanes& sum) {
        return {_mm512_fmadd_ps(p.first, q.first, sum.first), _mm512_fmadd_ps(p.second, q.second, sum.second)};
    }
};

struct Avx512Float32 : Avx512 {
    using Element = float;

    static Lanes load(const float* from) { return {_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)}; }

    static Factor load_factor(const float* from) { return load(from); }

    static void store(float* to, const Lanes& lanes) {
        _mm512_storeu_ps(to, lanes.first);
        _mm512_storeu_ps(to + 16, lanes.second);
    }
};

// The lanes' first half holds the even elements, the second half the odd ones: a shift and a mask widen 32 of them.
struct Avx512Bfloat16 : Avx512 {
    using Element = uint16_t;

    static Lanes load(const uint16_t* from) {
        const __m512i pairs = _mm512_loadu_si512(from);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), _mm512_castsi512_ps(_mm512_and_si512(pairs, upper_halves()))};
    }

    static Factor load_factor(const uint16_t* from) { return load(from); }

    static Lanes load(const float* from) {
        const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + 16);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        return {_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)};
    }

    static void store(uint16_t* to, const Lanes& lanes) {
        const __m512i even = _mm512_srli_epi32(rounded(lanes.first), 16);
        const __m512i odd = _mm512_and_si512(rounded(lanes.second), upper_halves());
        _mm512_storeu_si512(to, _mm512_or_si512(even, odd));
    }

   private:
    static __m512i upper_halves() { return _mm512_set1_epi32(static_cast<int>(0xffff0000u)); }

    // To nearest even in the upper half of each lane; NaN stays NaN.
    static __m512i rounded(__m512 lanes) {
        const __m512i bits = _mm512_castps_si512(lanes);
        const __m512i last_kept = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i number = _mm512_add_epi32(bits, _mm512_add_epi32(last_kept, _mm512_set1_epi32(0x7fff)));
        return _mm512_mask_mov_epi32(number, _mm512_cmp_ps_mask(lanes, lanes, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    }
};

}  // namespace

}  // namespace loramux
