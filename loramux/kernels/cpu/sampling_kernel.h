// The passes over one row of logits that choosing a token is made of, as each instruction set computes them.
//
// Everything is either a comparison or integers, or float32 arithmetic in a stated order that no compiler may fuse: every instruction set
// gives the same bits, and the torch definition in `reference/sampling.py` too.
#pragma once

#include <cstdint>

#include "isa.h"

namespace loramux {

// Logits whose largest values are known.
constexpr int64_t SAMPLING_BLOCK = 32;
// Logits whose weights are summed.
constexpr int64_t SAMPLING_SPAN = 256;

// What the weight of a token is made of: 2^40 e^((logit - peak) * coldness), and 0 where the power is less than min_p.
struct Weighing {
    float peak;
    float coldness;  // 1 / temperature
    float min_p;
};

struct SamplingKernel {
    // The largest of all; NaN where there is one. maxima [ceil(size / SAMPLING_BLOCK)] gets the largest of each block, if not null.
    float (*peak)(const float* logits, int64_t size, float* maxima);
    // weights [size]
    void (*weigh)(const float* logits, int64_t size, const Weighing& weighing, int64_t* weights);
    // sums [ceil(size / SAMPLING_SPAN)]
    void (*sum_spans)(const float* logits, int64_t size, const Weighing& weighing, int64_t* sums);
    // The tokens of at least this logit, in order, with their logits. ids, kept [size] -> how many
    int64_t (*collect)(const float* logits, int64_t size, float least, int32_t* ids, float* kept);
    // How many are more than this.
    int64_t (*count_above)(const float* logits, int64_t size, float bound);
};

// Of one instruction set; defined in the file of that name.
SamplingKernel sampling_portable();
#ifdef LORAMUX_X86
SamplingKernel sampling_avx2();
SamplingKernel sampling_avx512();
#endif

// Throws std::invalid_argument for an instruction set that this machine does not run.
SamplingKernel sampling_kernel(Isa isa);

}  // namespace loramux
