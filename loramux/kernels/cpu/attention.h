// softmax(scale * q k^T) v over paged keys and values, causal, with an optional sliding window.
#pragma once

#include <vector>

#include "dtype.h"
#include "isa.h"

namespace loramux {

// Sizes of one layer's attention. num_heads is a multiple of num_kv_heads; head_dim is even.
struct AttentionShape {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    // A token sees this many tokens, itself included; 0 is all before it.
    int64_t window;
    float scale;
    Dtype dtype;
};

// One layer's keys and values. Each KV block has, head by head, a packed operand (`vectors.h`) for the products it is read by:
//     k [num_blocks, num_kv_heads, head_dim / VNNI, block_size, VNNI]
//     v [num_blocks, num_kv_heads, block_size / VNNI, head_dim, VNNI]
// Every element is finite: attention reads masked cells.
struct KvCache {
    void* k;
    void* v;
};

// Sequence s owns rows [query_starts[s], query_starts[s + 1]) of the batch: the last of its context_lens[s] tokens, whose keys and values
// are in the cache already. Row i of its block table is block_tables + s * table_stride.
struct AttentionBatch {
    std::vector<int64_t> query_starts;
    std::vector<int64_t> context_lens;
    const int64_t* block_tables;
    int64_t table_stride;
};

// The pieces of one batch's attention, the same for every layer. Threads run pieces in any order: first all of phase 0, then all of
// phase 1 (which joins the parts of long contexts, and may be empty). How contexts are parted depends on their lengths alone, not on the
// number of threads.
class AttentionPlan {
   public:
    // max_batch pieces of scratch are allocated here, none later.
    AttentionPlan(const AttentionShape& shape, AttentionBatch batch, Isa isa);

    int64_t num_pieces(int phase) const;

    // q [T, num_heads * head_dim], rows q_stride elements apart; out the same, rows out_stride apart; of the shape's dtype.
    // With AMX a thread has called `begin_tiles` (`matmul.h`) before.
    void run(int phase, int64_t piece, const void* q, int64_t q_stride, const KvCache& cache, void* out, int64_t out_stride);

   private:
    AttentionShape shape_;
    AttentionBatch batch_;
};

// Writes a token's keys and values, [num_kv_heads, head_dim] each, at kv_slot = block * block_size + offset. NaN becomes 0 and magnitudes
// are cut to 1e30: a value that overflowed under one adapter must not reach whoever reads past the end of a block.
void write_kv(const AttentionShape& shape, const void* k, const void* v, const KvCache& cache, int64_t kv_slot);

}  // namespace loramux
