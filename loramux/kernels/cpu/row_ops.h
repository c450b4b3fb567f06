// What a layer does to one row at a time. Elements are of the dtype the kernels are chosen for, sums float32, results rounded once.
#pragma once

#include "dtype.h"
#include "isa.h"

namespace loramux {

struct RowOps {
    // y = x / sqrt(mean(x^2) + eps) * weight; x, weight and y [size], y may be x.
    void (*rms_norm)(const void* x, const void* weight, float eps, int64_t size, void* y);
    // x += y, both [size].
    void (*add)(void* x, const void* y, int64_t size);
    // y = silu(gate) * up, all [size].
    void (*silu_mul)(const void* gate, const void* up, int64_t size, void* y);
    // x = x * cos + [-second half, first half] * sin in place; x [head_dim], cos and sin float32 [head_dim].
    void (*rotate)(void* x, const float* cos, const float* sin, int64_t head_dim);
};

// Of one instruction set; defined in the file of that name.
RowOps row_ops_portable(Dtype dtype);
#ifdef LORAMUX_X86
RowOps row_ops_avx2(Dtype dtype);
RowOps row_ops_avx512(Dtype dtype);
#endif

// Throws std::invalid_argument for an instruction set that this machine does not run.
RowOps row_ops(Isa isa, Dtype dtype);

}  // namespace loramux
