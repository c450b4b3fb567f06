// The update of a long segment in bfloat16 as packed products (`matmul.h`): for machines that multiply bfloat16, several times faster.
//
// s = x A^T is kept as two bfloat16 terms, the second what the first leaves out: together they have 16 bits of it. They lie side by side
// and meet B twice: y += [high, low] [B; B].
#pragma once

#include "bfloat16.h"
#include "lora_kernel.h"
#include "lora_weights.h"
#include "matmul.h"
#include "matrix.h"
#include "scratch.h"
#include "team.h"

namespace loramux {

class LoraPanels {
   public:
    // Whether so many rows are worth packing an adapter's weights.
    static bool pay(int64_t num_rows, Dtype dtype, Isa isa);

    // Of rows [first_row, first_row + num_rows) of the batches' matrices.
    LoraPanels(const LoraAdapter& adapter, int64_t first_row, int64_t num_rows, LoraKernel kernel, Isa isa);

    // Three phases of one update: every member calls each when all have done the one before.
    void pack(const LoraSite& site, const Member& member);
    void shrink(const LoraSite& site, const Matrix& x, const Member& member);
    void expand(const LoraSite& site, const Matrix& y, bool y_is_float32, const Member& member);

   private:
    struct Terms {
        const Bfloat16* elements;
        int64_t stride;
        int64_t num_rows;
    };

    void shrink_part(const LoraSite& site, const Matrix& x, int64_t row, int64_t num_rows);

    void expand_part(const LoraSlice& slice, Terms terms, const Bfloat16* b, const Matrix& y, bool y_is_float32, int64_t row, int64_t column,
                     int64_t num_columns);

    int64_t first_row_;
    int64_t num_rows_;
    LoraKernel kernel_;
    MatmulKernel matmul_;
    // Of the update at hand: A packed, B of each slice packed, and the terms of s.
    Scratch a_memory_, b_memory_, terms_memory_;
    Bfloat16* a_;
    Bfloat16* b_;
    Bfloat16* terms_;
};

}  // namespace loramux
