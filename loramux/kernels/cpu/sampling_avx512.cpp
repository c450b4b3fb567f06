#include <immintrin.h>

#include "sampling_loops.h"

namespace loramux {

namespace {

int64_t collect_compressed(const float* logits, int64_t size, float least, int32_t* ids, float* kept) {
    const __m512 bound = _mm512_set1_ps(least);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t count = 0;
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 inside = i + 16 <= size ? 0xffff : (1u << (size - i)) - 1;
        const __m512 values = _mm512_maskz_loadu_ps(inside, logits + i);
        const __mmask16 found = _mm512_mask_cmp_ps_mask(inside, values, bound, _CMP_GE_OQ);
        if (found == 0) continue;
        const int num = __builtin_popcount(found);
        const __mmask16 first = (1u << num) - 1;
        _mm512_mask_storeu_ps(kept + count, first, _mm512_maskz_compress_ps(found, values));
        const __m512i tokens = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
        _mm512_mask_storeu_epi32(ids + count, first, _mm512_maskz_compress_epi32(found, tokens));
        count += num;
    }
    return count;
}

}  // namespace

SamplingKernel sampling_avx512() { return {peak, weigh, sum_spans, collect_compressed, count_above}; }

}  // namespace loramux
