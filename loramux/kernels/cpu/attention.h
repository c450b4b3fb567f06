// softmax(scale * q k^T) v over paged keys and values, causal, with an optional sliding window.
#pragma once

#include <memory>
#include <vector>

#include "attention_kernel.h"

namespace loramux {

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
    // The only scratch, that of parted contexts, is allocated here. Throws std::invalid_argument for sizes that the kernels don't know
    // (head_dim odd or above 512, block_size no multiple of 16, heads that key heads don't divide, a scale that is not positive), and for
    // an instruction set that this machine does not run.
    AttentionPlan(const AttentionShape& shape, AttentionBatch batch, Isa isa);

    int64_t num_pieces(int phase) const;

    // q [T, num_heads * head_dim], rows q_stride elements apart; out the same, rows out_stride apart; of the shape's dtype.
    // With AMX a thread has called `begin_tiles` (`matmul.h`) before.
    void run(int phase, int64_t piece, const void* q, int64_t q_stride, const KvCache& cache, void* out, int64_t out_stride);

   private:
    // A piece is one of these at one key head; a piece of phase 1 joins the parts of a sequence's rows.
    struct Task {
        int64_t sequence;
        int64_t first_row;
        int64_t num_rows;
        int64_t key_begin;
        int64_t key_end;
        // Floats from partials_ to those of the first key head, or -1, and from one head to the next.
        int64_t partial;
        int64_t partial_stride;
        int64_t cost() const { return num_rows * (key_end - key_begin); }
    };
    struct Join {
        int64_t sequence;
        int64_t num_rows;
        int64_t num_parts;
        int64_t partial;
        int64_t partial_stride;
    };

    void add_tasks(int64_t sequence);
    void add_parts(const Task& whole);
    int64_t first_position(int64_t sequence) const;
    int64_t first_key(int64_t position) const;

    AttentionShape shape_;
    AttentionBatch batch_;
    AttentionKernel kernel_;
    std::vector<Task> tasks_;
    std::vector<Join> joins_;
    int64_t num_partials_ = 0;
    std::unique_ptr<float[]> partials_;
};

// Writes a token's keys and values, [num_kv_heads, head_dim] each, at kv_slot = block * block_size + offset. NaN becomes 0 and magnitudes
// are cut to 1e30: a value that overflowed under one adapter must not reach whoever reads past the end of a block.
void write_kv(const AttentionShape& shape, const void* k, const void* v, const KvCache& cache, int64_t kv_slot);

}  // namespace loramux
