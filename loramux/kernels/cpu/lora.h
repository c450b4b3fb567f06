// Low-rank updates of a batch: y = gain * y + (x A^T)[:, ranks] B + shift, for every adapter's rows and every slice of a layer.
#pragma once

#include <memory>
#include <vector>

#include "lora_kernel.h"
#include "lora_panels.h"
#include "lora_weights.h"
#include "matrix.h"
#include "team.h"

namespace loramux {

// Rows [start, end) of a batch, and the adapter that answers for them.
struct LoraSegment {
    int64_t start;
    int64_t end;
    const LoraAdapter* adapter;

    // Whether it has panels.
    bool is_long = false;

    int64_t num_rows() const { return end - start; }
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
// of threads nor on which other segments are in the batch.
//
// An update is some phases, in which each member takes its share of the work, and between which all meet: see `update`.
class LoraPlan {
   public:
    // Throws std::invalid_argument where segments are empty, out of order or overlap, and for an instruction set that this machine does
    // not run.
    LoraPlan(std::vector<LoraSegment> segments, Dtype dtype, Isa isa);

    // Whether an adapter of the batch changes the layer.
    bool changes(size_t site) const;
    // Changes y [T, out_features], of the plan's dtype or of float32, by x [T, in_features] of the plan's dtype, rows padded as for a
    // product (`matmul.h`); all members call this, and all is done when it returns. work() is run beside the first phase, and has computed y when the members next meet.
    template <class Work>
    void update(size_t site, const Matrix& y, bool y_is_float32, const Matrix& x, Member& member, Work work);

    bool changes_embedding() const;
    // Changes embeddings y [T, hidden] of tokens token_ids [T].
    void update_embedding(const Matrix& y, const int64_t* token_ids, Member& member);

    // A whole update of y, in the plan's dtype, on num_threads threads. Throws std::invalid_argument, before anything is written, where a
    // matrix does not fit the layer or the segments.
    void apply(size_t site, const Matrix& y, const Matrix& x, int num_threads);
    // The same where a token is not in the vocabulary.
    void embed(const Matrix& y, const int64_t* token_ids, int64_t num_tokens, int num_threads);

   private:
    int64_t num_rows() const { return segments_.empty() ? 0 : segments_.back().end; }
    float* shrunk(const LoraSegment& segment, int64_t rank) const;
    // Of short segments; long ones have panels.
    void shrink(size_t site, const Matrix& x, const Member& member);
    void expand(size_t site, const Matrix& y, bool y_is_float32, const Member& member);
    void expand(const LoraSegment& segment, const LoraSlice& slice, const Matrix& y, bool y_is_float32, LoraShare& share) const;
    // Calls visit(panels, site's weights) for each long segment that the site changes.
    template <class Visit>
    void each_long(size_t site, Visit visit);

    struct Long {
        const LoraAdapter* adapter;
        std::unique_ptr<LoraPanels> panels;
    };

    std::vector<LoraSegment> segments_;
    // Those of them that have panels.
    std::vector<Long> long_;
    Dtype dtype_;
    Isa isa_;
    LoraKernel kernel_;
    int64_t max_ranks_ = 0;
    // A x^T of each segment, [max_ranks_, its rows], one after another. Ranks lie outside, as threads share those: two that write to one
    // cache line wait for each other.
    std::unique_ptr<float[]> shrunk_;
};

template <class Visit>
void LoraPlan::each_long(size_t site, Visit visit) {
    for (const auto& each : long_)
        if (const auto& changed = each.adapter->sites[site]) visit(*each.panels, *changed);
}

template <class Work>
void LoraPlan::update(size_t site, const Matrix& y, bool y_is_float32, const Matrix& x, Member& member, Work work) {
    each_long(site, [&](LoraPanels& panels, const LoraSite& changed) { panels.pack(changed, member); });
    shrink(site, x, member);
    work();
    member.meet();
    if (!long_.empty()) {
        each_long(site, [&](LoraPanels& panels, const LoraSite& changed) { panels.shrink(changed, x, member); });
        member.meet();
        each_long(site, [&](LoraPanels& panels, const LoraSite& changed) { panels.expand(changed, y, y_is_float32, member); });
    }
    expand(site, y, y_is_float32, member);
    member.meet();
}

}  // namespace loramux
