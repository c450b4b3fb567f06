// Low-rank updates of a batch: y = gain * y + (x A^T)[:, ranks] B + shift, for every adapter's rows and every slice of a layer.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "lora_kernel.h"

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

// A contiguous matrix of a batch, of the plan's dtype.
struct LoraMatrix {
    void* elements;
    int64_t num_rows;
    int64_t num_columns;
};

// Pieces of work that threads share: each takes neighbouring ones, of about the same cost in all.
template <class Piece>
class LoraPhase {
   public:
    void add(const Piece& piece, int64_t cost) {
        pieces_.push_back({piece, total_cost_});
        total_cost_ += cost;
    }

    void clear() {
        pieces_.clear();
        total_cost_ = 0;
    }

    int64_t total_cost() const { return total_cost_; }

    void run(void (*kernel)(const Piece&), int thread, int num_threads) const {
        const int64_t begin = total_cost_ * thread / num_threads, end = total_cost_ * (thread + 1) / num_threads;
        for (const auto& each : pieces_)
            if (begin <= each.cost_before && each.cost_before < end) kernel(each.piece);
    }

   private:
    struct Placed {
        Piece piece;
        int64_t cost_before;
    };
    std::vector<Placed> pieces_;
    int64_t total_cost_ = 0;
};

// The segments of one batch and the scratch memory of their updates. One thread at a time uses a plan; it works on num_threads threads of
// the OpenMP pool. Results depend neither on num_threads nor on which other rows are in the batch.
class LoraPlan {
   public:
    // Throws std::invalid_argument where segments are empty, out of order or overlap, and for an instruction set that this machine does
    // not run.
    LoraPlan(std::vector<LoraSegment> segments, LoraDtype dtype, Isa isa, int num_threads);

    // Changes y [T, out_features] by x [T, in_features]. Throws std::invalid_argument, before anything is written, where a matrix does not
    // fit the layer or the segments.
    void apply(size_t site, const LoraMatrix& y, const LoraMatrix& x);

    // Changes embeddings y [T, hidden] of tokens token_ids [num_tokens]. Throws std::invalid_argument, before anything is written, where y
    // does not fit or a token is not in the vocabulary.
    void embed(const LoraMatrix& y, const int64_t* token_ids, int64_t num_tokens);

   private:
    int64_t num_rows() const { return segments_.empty() ? 0 : segments_.back().end; }
    float* shrunk(const LoraSegment& segment, int64_t rank) const;
    void add_shrinks(const LoraSegment& segment, const LoraSite& site, const LoraMatrix& x);
    void add_expands(const LoraSegment& segment, const LoraSlice& slice, const LoraMatrix& y);
    void look_up(const LoraSegment& segment, const LoraEmbedding& embedding, const int64_t* token_ids);
    void run();

    std::vector<LoraSegment> segments_;
    LoraDtype dtype_;
    LoraKernel kernel_;
    int num_threads_;
    int64_t max_ranks_ = 0;
    // A x^T of each segment, [max_ranks_, its rows], one after another. Ranks lie outside, as threads share those: two that write to one
    // cache line wait for each other.
    std::unique_ptr<float[]> shrunk_;
    // Of the call at hand.
    LoraPhase<LoraShrink> shrinks_;
    LoraPhase<LoraExpand> expands_;
};

}  // namespace loramux
