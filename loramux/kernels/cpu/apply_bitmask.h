#pragma once

#include <cstdint>

#include "isa.h"

namespace loramux {

// logits[rows[i], t] = -inf in place where bit t of bitmask[i] is 0.
//
// logits float32 [num_rows, vocab_size]; bitmask int32 [num_masks, ceil(vocab_size / 32)]; rows int64 [num_masks]. All contiguous.
// Throws std::out_of_range, before writing anything, where a row is not in [0, num_rows); std::invalid_argument for an instruction
// set that this machine does not run.
void apply_bitmask(float* logits, int64_t num_rows, int64_t vocab_size, const int32_t* bitmask, const int64_t* rows, int64_t num_masks,
                   Isa isa);

}  // namespace loramux
