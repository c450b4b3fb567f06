#include <immintrin.h>

#include "lora_tiles.h"

namespace loramux {

namespace {

struct Avx2 {
    static constexpr int WIDTH = 16;
    static constexpr int SHRINK_RANKS = 4;
    static constexpr int EXPAND_ROWS = 6;

    using Sum = __m256;
    struct Lanes {
        __m256 first, second;
    };
    using Factor = Lanes;

    static Sum dot(Sum sum, const Factor& x, const Factor& a) {
        return _mm256_fmadd_ps(x.second, a.second, _mm256_fmadd_ps(x.first, a.first, sum));
    }

    static float total(Sum sum) {
        __m128 part = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
        part = _mm_add_ps(part, _mm_movehl_ps(part, part));
        return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
    }

    static Lanes all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }

    static Lanes add(const Lanes& p, const Lanes& q) { return {_mm256_add_ps(p.first, q.first), _mm256_add_ps(p.second, q.second)}; }

    static Lanes multiply_add(const Lanes& p, const Lanes& q, const Lanes& sum) {
        return {_mm256_fmadd_ps(p.first, q.first, sum.first), _mm256_fmadd_ps(p.second, q.second, sum.second)};
    }
};

struct Avx2Float32 : Avx2 {
    using Element = float;
    static constexpr int SHRINK_ROWS = 2;

    static Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }

    static Factor load_factor(const float* from) { return load(from); }

    static void store(float* to, const Lanes& lanes) {
        _mm256_storeu_ps(to, lanes.first);
        _mm256_storeu_ps(to + 8, lanes.second);
    }
};

// The lanes' first half holds the even elements, the second half the odd ones: a shift and a mask widen 16 of them.
struct Avx2Bfloat16 : Avx2 {
    using Element = uint16_t;
    static constexpr int SHRINK_ROWS = 2;

    static Lanes load(const uint16_t* from) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(_mm256_and_si256(pairs, upper_halves()))};
    }

    static Factor load_factor(const uint16_t* from) { return load(from); }

    static Lanes load(const float* from) {
        const __m256 low = _mm256_loadu_ps(from), high = _mm256_loadu_ps(from + 8);
        return {in_order(_mm256_shuffle_ps(low, high, 0x88)), in_order(_mm256_shuffle_ps(low, high, 0xdd))};
    }

    static void store(uint16_t* to, const Lanes& lanes) {
        const __m256i even = _mm256_srli_epi32(rounded(lanes.first), 16);
        const __m256i odd = _mm256_and_si256(rounded(lanes.second), upper_halves());
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_or_si256(even, odd));
    }

   private:
    static __m256i upper_halves() { return _mm256_set1_epi32(static_cast<int>(0xffff0000u)); }

    static __m256 in_order(__m256 quarters) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(quarters), 0xd8)); }

    // To nearest even in the upper half of each lane; NaN stays NaN.
    static __m256i rounded(__m256 lanes) {
        const __m256i bits = _mm256_castps_si256(lanes);
        const __m256i last_kept = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i number = _mm256_add_epi32(bits, _mm256_add_epi32(last_kept, _mm256_set1_epi32(0x7fff)));
        const __m256 is_nan = _mm256_cmp_ps(lanes, lanes, _CMP_UNORD_Q);
        return _mm256_blendv_epi8(number, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(is_nan));
    }
};

}  // namespace

LoraKernel lora_avx2(LoraDtype dtype) { return kernel_for<Avx2Float32, Avx2Bfloat16>(dtype); }

}  // namespace loramux
