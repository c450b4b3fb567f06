// `vectors.h` in AVX-512F, and with AVX-512-BF16's dot products where the file is compiled for them.
#pragma once

#include <immintrin.h>

#include "vectors.h"
#include "vectors_exp.h"

namespace loramux {

namespace {

struct Avx512 {
    static constexpr int W = 16;
    static constexpr int TILE_ROWS = 8;
    static constexpr int TILE_BLOCKS = 3;
    using F = __m512;

    static F all(float value) { return _mm512_set1_ps(value); }

    static F load(const float* from) { return _mm512_loadu_ps(from); }
    static F load(const Bfloat16* from) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    static F load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first(count), from); }
    static F load(const Bfloat16* from, int64_t count) {
        Bfloat16 padded[W] = {};
        std::memcpy(padded, from, count * sizeof(Bfloat16));
        return load(padded);
    }

    static void store(float* to, F values) { _mm512_storeu_ps(to, values); }
    static void store(Bfloat16* to, F values) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrowed(values)); }
    static void store(float* to, F values, int64_t count) { _mm512_mask_storeu_ps(to, first(count), values); }
    static void store(Bfloat16* to, F values, int64_t count) {
        Bfloat16 padded[W];
        store(padded, values);
        std::memcpy(to, padded, count * sizeof(Bfloat16));
    }

    static F add(F p, F q) { return _mm512_add_ps(p, q); }
    static F subtract(F p, F q) { return _mm512_sub_ps(p, q); }
    static F multiply(F p, F q) { return _mm512_mul_ps(p, q); }
    static F divide(F p, F q) { return _mm512_div_ps(p, q); }
    static F multiply_add(F p, F q, F sum) { return _mm512_fmadd_ps(p, q, sum); }
    static F max(F p, F q) { return _mm512_max_ps(p, q); }
    static F min(F p, F q) { return _mm512_min_ps(p, q); }
    static F or_zero(F values) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(values, values, _CMP_ORD_Q), values); }
    static float total(F values) { return _mm512_reduce_add_ps(values); }
    static float highest(F values) { return _mm512_reduce_max_ps(values); }

    static F round(F values) { return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F scale(F values, F n) { return _mm512_scalef_ps(values, n); }
    static F exp(F values) { return exp_by_polynomial<Avx512>(values); }

    template <class T>
    struct Packed;

    static Packed<float> load_packed(const float* from);
    static Packed<Bfloat16> load_packed(const Bfloat16* from);
    template <class T>
    static Packed<T> widen_packed(const int8_t* from, int64_t stride);
    static Packed<float> all_packed(const float* from);
    static Packed<Bfloat16> all_packed(const Bfloat16* from);
    static F dot(F sum, const Packed<float>& x, const Packed<float>& w);
    static F dot(F sum, const Packed<Bfloat16>& x, const Packed<Bfloat16>& w);

   private:
    static F widened(const int8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }

    static __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

    // To nearest even; NaN stays NaN.
    static __m256i narrowed(F values) {
        const __m512i bits = _mm512_castps_si512(values);
        const __m512i last_kept = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i number = _mm512_add_epi32(bits, _mm512_add_epi32(last_kept, _mm512_set1_epi32(0x7fff)));
        const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(number, is_nan, _mm512_set1_epi32(0x7fc00000)), 16));
    }
};

template <>
struct Avx512::Packed<float> {
    __m512 values;
};

inline Avx512::Packed<float> Avx512::load_packed(const float* from) { return {_mm512_loadu_ps(from)}; }
template <>
inline Avx512::Packed<float> Avx512::widen_packed(const int8_t* from, int64_t) {
    return {widened(from)};
}
inline Avx512::Packed<float> Avx512::all_packed(const float* from) { return {_mm512_set1_ps(*from)}; }
inline __m512 Avx512::dot(__m512 sum, const Packed<float>& x, const Packed<float>& w) { return _mm512_fmadd_ps(x.values, w.values, sum); }

inline __m512i all_pairs(const Bfloat16* from) {
    int pair;
    std::memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}

#ifdef __AVX512BF16__

template <>
struct Avx512::Packed<Bfloat16> {
    __m512bh pairs;
};

inline Avx512::Packed<Bfloat16> Avx512::load_packed(const Bfloat16* from) {
    return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(from))};
}
// A whole number of 8 bits is a bfloat16: the upper half of its float32.
template <>
inline Avx512::Packed<Bfloat16> Avx512::widen_packed(const int8_t* from, int64_t stride) {
    constexpr int FIRST_OR_BOTH_OTHERS = 0xf8;
    const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(widened(from)), 16), odd = _mm512_castps_si512(widened(from + stride));
    const __m512i upper_halves = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {reinterpret_cast<__m512bh>(_mm512_ternarylogic_epi32(even, odd, upper_halves, FIRST_OR_BOTH_OTHERS))};
}
inline Avx512::Packed<Bfloat16> Avx512::all_packed(const Bfloat16* from) { return {reinterpret_cast<__m512bh>(all_pairs(from))}; }
inline __m512 Avx512::dot(__m512 sum, const Packed<Bfloat16>& x, const Packed<Bfloat16>& w) {
    return _mm512_dpbf16_ps(sum, x.pairs, w.pairs);
}

#else

template <>
struct Avx512::Packed<Bfloat16> {
    __m512 even, odd;
};

inline Avx512::Packed<Bfloat16> halves_of(__m512i pairs) {
    const __m512i upper_halves = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), _mm512_castsi512_ps(_mm512_and_si512(pairs, upper_halves))};
}

inline Avx512::Packed<Bfloat16> Avx512::load_packed(const Bfloat16* from) { return halves_of(_mm512_loadu_si512(from)); }
template <>
inline Avx512::Packed<Bfloat16> Avx512::widen_packed(const int8_t* from, int64_t stride) {
    return {widened(from), widened(from + stride)};
}
inline Avx512::Packed<Bfloat16> Avx512::all_packed(const Bfloat16* from) { return halves_of(all_pairs(from)); }
inline __m512 Avx512::dot(__m512 sum, const Packed<Bfloat16>& x, const Packed<Bfloat16>& w) {
    return _mm512_fmadd_ps(x.odd, w.odd, _mm512_fmadd_ps(x.even, w.even, sum));
}

#endif

}  // namespace

}  // namespace loramux
