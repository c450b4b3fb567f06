// `vectors.h` in AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include "vectors.h"
#include "vectors_exp.h"

namespace loramux {

namespace {

struct Avx2 {
    static constexpr int W = 8;
    static constexpr int TILE_ROWS = 4;
    static constexpr int TILE_BLOCKS = 1;
    using F = __m256;

    static F all(float value) { return _mm256_set1_ps(value); }

    static F load(const float* from) { return _mm256_loadu_ps(from); }
    static F load(const Bfloat16* from) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    template <class T>
    static F load(const T* from, int64_t count) {
        T padded[W] = {};
        std::memcpy(padded, from, count * sizeof(T));
        return load(padded);
    }

    static void store(float* to, F values) { _mm256_storeu_ps(to, values); }
    static void store(Bfloat16* to, F values) {
        const __m256i upper = _mm256_srli_epi32(rounded(values), 16);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
    }
    template <class T>
    static void store(T* to, F values, int64_t count) {
        T padded[W];
        store(padded, values);
        std::memcpy(to, padded, count * sizeof(T));
    }

    static F add(F p, F q) { return _mm256_add_ps(p, q); }
    static F subtract(F p, F q) { return _mm256_sub_ps(p, q); }
    static F multiply(F p, F q) { return _mm256_mul_ps(p, q); }
    static F divide(F p, F q) { return _mm256_div_ps(p, q); }
    static F multiply_add(F p, F q, F sum) { return _mm256_fmadd_ps(p, q, sum); }
    static F max(F p, F q) { return _mm256_max_ps(p, q); }
    static F min(F p, F q) { return _mm256_min_ps(p, q); }
    static F or_zero(F values) { return _mm256_and_ps(values, _mm256_cmp_ps(values, values, _CMP_ORD_Q)); }

    static float total(F values) {
        __m128 part = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
        part = _mm_add_ps(part, _mm_movehl_ps(part, part));
        return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
    }
    static float highest(F values) {
        __m128 part = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
        part = _mm_max_ps(part, _mm_movehl_ps(part, part));
        return _mm_cvtss_f32(_mm_max_ss(part, _mm_movehdup_ps(part)));
    }

    static F round(F values) { return _mm256_round_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // In two steps, so that 2^n may be as small as a subnormal result needs.
    static F scale(F values, F n) {
        const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
        return multiply(multiply(values, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
    }
    static F exp(F values) { return exp_by_polynomial<Avx2>(values); }

    template <class T>
    struct Packed {
        F part[VNNI<T>];
    };

    static Packed<float> load_packed(const float* from) { return {{load(from)}}; }
    static Packed<Bfloat16> load_packed(const Bfloat16* from) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(_mm256_and_si256(pairs, upper_halves()))}};
    }
    template <class T>
    static Packed<T> widen_packed(const int8_t* from, int64_t stride) {
        Packed<T> result;
        for (int row = 0; row < VNNI<T>; ++row) result.part[row] = widened(from + row * stride);
        return result;
    }
    static Packed<float> all_packed(const float* from) { return {{_mm256_broadcast_ss(from)}}; }
    static Packed<Bfloat16> all_packed(const Bfloat16* from) {
        return {{all(bfloat16_to_float(from[0].bits)), all(bfloat16_to_float(from[1].bits))}};
    }
    static F dot(F sum, const Packed<float>& x, const Packed<float>& w) { return _mm256_fmadd_ps(x.part[0], w.part[0], sum); }
    static F dot(F sum, const Packed<Bfloat16>& x, const Packed<Bfloat16>& w) {
        return _mm256_fmadd_ps(x.part[1], w.part[1], _mm256_fmadd_ps(x.part[0], w.part[0], sum));
    }

   private:
    static F widened(const int8_t* from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }

    static __m256i upper_halves() { return _mm256_set1_epi32(static_cast<int>(0xffff0000u)); }

    static F power_of_two(__m256i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }

    // To nearest even in the upper half of each element; NaN stays NaN.
    static __m256i rounded(F values) {
        const __m256i bits = _mm256_castps_si256(values);
        const __m256i last_kept = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i number = _mm256_add_epi32(bits, _mm256_add_epi32(last_kept, _mm256_set1_epi32(0x7fff)));
        const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
        return _mm256_blendv_epi8(number, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(is_nan));
    }
};

}  // namespace

}  // namespace loramux
