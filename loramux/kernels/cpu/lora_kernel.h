// The two halves of a low-rank update, as each instruction set computes them.
//
// Sums run in one order whatever the number of rows: a row's result does not depend on its companions.
#pragma once

#include "dtype.h"
#include "isa.h"

namespace loramux {

// s[rank, row] = sum over i of a[rank, i] * x[row, i]
//
// x [num_rows, in_features] and a [num_ranks, in_features] of the kernel's dtype, a contiguous, rows of x and ranks of s (float32) their
// stride apart.
struct LoraShrink {
    const void* x;
    int64_t x_stride;
    int64_t num_rows;
    int64_t in_features;
    const void* a;
    int64_t num_ranks;
    float* s;
    int64_t s_stride;
};

// y[row, c] = gain[c] * y[row, c] + sum over r of s[r, row] * b[r, c] + shift[c], rounded once, to nearest even
//
// y [num_rows, num_columns] and b [num_ranks, num_columns] of the kernel's dtype; s [num_ranks, num_rows] float32; rows are their stride
// apart. gain and shift float32 [num_columns], or null for 1 and 0.
struct LoraExpand {
    void* y;
    int64_t y_stride;
    int64_t num_rows;
    const float* s;
    int64_t s_stride;
    int64_t num_ranks;
    const void* b;
    int64_t b_stride;
    int64_t num_columns;
    const float* gain;
    const float* shift;
};

// y[row, c] = gain[c] * y[row, c] + delta[row, c] + shift[c], rounded once; as above, delta float32.
struct LoraChange {
    void* y;
    int64_t y_stride;
    int64_t num_rows;
    const float* delta;
    int64_t delta_stride;
    int64_t num_columns;
    const float* gain;
    const float* shift;
};

// `..._float32` change y in float32, the others in the dtype that the kernel is chosen for.
struct LoraKernel {
    void (*shrink)(const LoraShrink&);
    void (*expand)(const LoraExpand&);
    void (*expand_float32)(const LoraExpand&);
    void (*change)(const LoraChange&);
    void (*change_float32)(const LoraChange&);
};

// Of one instruction set; defined in the file of that name.
LoraKernel lora_portable(Dtype dtype);
#ifdef LORAMUX_X86
LoraKernel lora_avx2(Dtype dtype);
LoraKernel lora_avx512(Dtype dtype);
LoraKernel lora_avx512_bf16(Dtype dtype);
#endif

// Throws std::invalid_argument for an instruction set that this machine does not run.
LoraKernel lora_kernel(Isa isa, Dtype dtype);

}  // namespace loramux
