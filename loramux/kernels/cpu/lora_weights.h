// What an adapter changes, as addresses: its owner keeps the memory.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

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

}  // namespace loramux
