#include "apply_bitmask.h"

#include <limits>
#include <stdexcept>
#include <string>

#ifdef LORAMUX_X86
#include <immintrin.h>
#endif

namespace loramux {

namespace {

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr uint32_t ALL_ALLOWED = 0xffffffffu;

using MaskRow = void (*)(float* logits, const uint32_t* words, int64_t vocab_size);

void mask_word(float* logits, uint32_t word, int64_t num_tokens) {
    for (int64_t t = 0; t < num_tokens; ++t)
        if (!(word >> t & 1u)) logits[t] = NEG_INF;
}

// The last word of a row whose vocabulary is not a multiple of 32; its bits past the vocabulary mean nothing.
void mask_tail(float* logits, const uint32_t* words, int64_t vocab_size) {
    const int64_t done = vocab_size / 32 * 32;
    if (done < vocab_size) mask_word(logits + done, words[done / 32], vocab_size - done);
}

void mask_row_scalar(float* logits, const uint32_t* words, int64_t vocab_size) {
    for (int64_t w = 0; w < vocab_size / 32; ++w)
        if (words[w] != ALL_ALLOWED) mask_word(logits + 32 * w, words[w], 32);
    mask_tail(logits, words, vocab_size);
}

#ifdef LORAMUX_X86

LORAMUX_TARGET("avx2") void mask_row_avx2(float* logits, const uint32_t* words, int64_t vocab_size) {
    const __m256 neg_inf = _mm256_set1_ps(NEG_INF);
    const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int64_t w = 0; w < vocab_size / 32; ++w) {
        const uint32_t word = words[w];
        if (word == ALL_ALLOWED) continue;
        for (int byte = 0; byte < 4; ++byte) {
            float* lanes = logits + 32 * w + 8 * byte;
            const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(word >> (8 * byte))), lane_bit);
            const __m256 allowed = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, lane_bit));
            _mm256_storeu_ps(lanes, _mm256_blendv_ps(neg_inf, _mm256_loadu_ps(lanes), allowed));
        }
    }
    mask_tail(logits, words, vocab_size);
}

LORAMUX_TARGET("avx512f") void mask_row_avx512(float* logits, const uint32_t* words, int64_t vocab_size) {
    const __m512 neg_inf = _mm512_set1_ps(NEG_INF);
    for (int64_t w = 0; w < vocab_size / 32; ++w) {
        const uint32_t refused = ~words[w];
        if (refused == 0) continue;
        _mm512_mask_storeu_ps(logits + 32 * w, static_cast<__mmask16>(refused), neg_inf);
        _mm512_mask_storeu_ps(logits + 32 * w + 16, static_cast<__mmask16>(refused >> 16), neg_inf);
    }
    mask_tail(logits, words, vocab_size);
}

#endif

MaskRow choose(Isa isa) {
    if (!is_supported(isa)) throw std::invalid_argument("this machine does not run the instruction set asked for");
#ifdef LORAMUX_X86
    if (isa >= Isa::AVX512) return mask_row_avx512;
    if (isa == Isa::AVX2) return mask_row_avx2;
#endif
    return mask_row_scalar;
}

}  // namespace

void apply_bitmask(float* logits, int64_t num_rows, int64_t vocab_size, const int32_t* bitmask, const int64_t* rows, int64_t num_masks,
                   Isa isa) {
    const MaskRow mask_row = choose(isa);
    for (int64_t i = 0; i < num_masks; ++i)
        if (rows[i] < 0 || rows[i] >= num_rows)
            throw std::out_of_range("row " + std::to_string(rows[i]) + " of " + std::to_string(num_rows) + " rows of logits");
    const int64_t num_words = (vocab_size + 31) / 32;
    const auto* words = reinterpret_cast<const uint32_t*>(bitmask);
    for (int64_t i = 0; i < num_masks; ++i) mask_row(logits + rows[i] * vocab_size, words + i * num_words, vocab_size);
}

}  // namespace loramux
