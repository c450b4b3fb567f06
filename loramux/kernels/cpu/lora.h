// Low-rank updates of a batch: y = gain * y + (x A^T)[:, ranks] B + shift, for every adapter's rows and every slice of a layer.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "lora_kernel.h"
#include "team.h"

namespace loramux {

// Columns [out_start, out_end) of a layer's output. b [rank_end - rank_start, out_end - out_start], contiguous, of the plan's dtype; gain
// and shift float32 [out_end - out_start], or null for 1 and 0.
struct LoraSlice {
    int64_t rank_start;
    int64_t rank_end;
    int64_t out_start;
    int64_t out_end;
    const void* b;
    const float* gain;
    const float* shift;
};

// What one adapter changes at one linear layer. a [num_ranks, in_features], contiguous, of the plan's dtype; slices share no column.
struct LoraSite {
    const void* a;
    int64_t num_ranks;
    int64_t in_features;
    int64_t out_features;
    std::vector<LoraSlice> slices;
};

// What one adapter changes at the embedding: its A, [vocab_size, ranks] here, has a row for each token.
struct LoraEmbedding {
    const void* a;
    int64_t vocab_size;
    LoraSlice slice;
};

// Refers to memory that its owner keeps.
class LoraAdapter {
   public:
    LoraAdapter(std::vector<std::optional<LoraSite>> sites, std::optional<LoraEmbedding> embedding);

    const std::vector<std::optional<LoraSite>> sites;
    const std::optional<LoraEmbedding> embedding;
    // The most of any site.
    const int64_t max_ranks;
};

// Rows [start, end) of a batch, and the adapter that answers for them.
struct LoraSegment {
    int64_t start;
    int64_t end;
    const LoraAdapter* adapter;

    int64_t num_rows() const { return end - start; }
};

// A matrix of a batch, rows `stride` elements apart.
struct LoraMatrix {
    void* elements;
    int64_t num_rows;
    int64_t num_columns;
    int64_t stride;
};

// One member's share of a phase: pieces of work go to the members in turn, neighbours of about the same cost in all to the same.
class LoraShare {
   public:
    explicit LoraShare(const Member& member) : member_(member) {}

    // Whether the next piece is this member's.
    bool takes(int64_t cost) {
        const int64_t turn = cost_before_ / COST_OF_A_TURN;
        cost_before_ += cost;
        return turn % member_.count == member_.index;
    }

   private:
    static constexpr int64_t COST_OF_A_TURN = 32768;

    const Member& member_;
    int64_t cost_before_ = 0;
};

// The segments of one batch and the scratch memory of their updates. One team at a time uses a plan. Results depend neither on the number
// of threads nor on which other rows are in the batch.
//
// An update is two phases: every member calls `shrink`, and when all are done, `expand`. Each takes its share of the work.
class LoraPlan {
   public:
    // Throws std::invalid_argument where segments are empty, out of order or overlap, and for an instruction set that this machine does
    // not run.
    LoraPlan(std::vector<LoraSegment> segments, Dtype dtype, Isa isa);

    // Whether an adapter of the batch changes the layer.
    bool changes(size_t site) const;
    // By x [T, in_features] of the plan's dtype, which is not read again.
    void shrink(size_t site, const LoraMatrix& x, const Member& member);
    // y [T, out_features] of the plan's dtype, or of float32.
    void expand(size_t site, const LoraMatrix& y, bool y_is_float32, const Member& member);

    bool changes_embedding() const;
    // The same for embeddings y [T, hidden] of tokens token_ids [T].
    void shrink_embedding(const int64_t* token_ids, const Member& member);
    void expand_embedding(const LoraMatrix& y, const Member& member);

    // A whole update of y, in the plan's dtype, on num_threads threads. Throws std::invalid_argument, before anything is written, where a
    // matrix does not fit the layer or the segments.
    void apply(size_t site, const LoraMatrix& y, const LoraMatrix& x, int num_threads);
    // The same where a token is not in the vocabulary.
    void embed(const LoraMatrix& y, const int64_t* token_ids, int64_t num_tokens, int num_threads);

   private:
    int64_t num_rows() const { return segments_.empty() ? 0 : segments_.back().end; }
    float* shrunk(const LoraSegment& segment, int64_t rank) const;
    void expand(const LoraSegment& segment, const LoraSlice& slice, const LoraMatrix& y, bool y_is_float32, LoraShare& share) const;

    std::vector<LoraSegment> segments_;
    Dtype dtype_;
    LoraKernel kernel_;
    int64_t max_ranks_ = 0;
    // A x^T of each segment, [max_ranks_, its rows], one after another. Ranks lie outside, as threads share those: two that write to one
    // cache line wait for each other.
    std::unique_ptr<float[]> shrunk_;
};

}  // namespace loramux
