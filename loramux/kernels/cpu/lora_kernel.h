// The two halves of a low-rank update, as each instruction set computes them.
//
// Sums run in one order whatever the number of rows: a row's result does not depend on its companions.
#pragma once

#include <cstdint>

#include "isa.h"

namespace loramux {

enum class LoraDtype { FLOAT32, BFLOAT16 };

// s[rank, row] = sum over i of a[rank, i] * x[row, i]
//
// x [num_rows, in_features] and a [num_ranks, in_features] of the kernel's dtype, contiguous; s float32, ranks s_stride apart.
struct LoraShrink {
    const void* x;
    int64_t num_rows;
    int64_t in_features;
    const void* a;
    int64_t num_ranks;
    float* s;
    int64_t s_stride;
};

// y[row, c] = gain[c] * y[row, c] + sum over r of s[r, row] * b[r, c] + shift[c], rounded once, to nearest even
//
// y [num_rows, num_columns] and b [num_ranks, num_columns] of the kernel's dtype, s [num_ranks, num_rows] float32; rows are their stride
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

struct LoraKernel {
    void (*shrink)(const LoraShrink&);
    void (*expand)(const LoraExpand&);
};

// Of one instruction set; defined in the file of that name.
LoraKernel lora_scalar(LoraDtype dtype);
#ifdef LORAMUX_X86
LoraKernel lora_avx2(LoraDtype dtype);
LoraKernel lora_avx512(LoraDtype dtype);
LoraKernel lora_avx512_bf16(LoraDtype dtype);
#endif

// Throws std::invalid_argument for an instruction set that this machine does not run.
LoraKernel lora_kernel(Isa isa, LoraDtype dtype);

}  // namespace loramux
