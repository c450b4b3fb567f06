#include "lora.h"

#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "bfloat16.h"

namespace loramux {

namespace {

// A piece of work: so many rows, which with what they are multiplied by fit a second-level cache, by so many ranks or columns.
constexpr int64_t PIECE_ROWS = 32;
constexpr int64_t PIECE_RANKS = 4;
constexpr int64_t PIECE_COLUMNS = 64;
// Reading a weight takes as long as multiplying it by so many rows, about.
constexpr int64_t READ_COST = 4;
// Below this, 10 us on one AVX2 core with weights from memory, a second thread costs more than it saves.
constexpr int64_t MIN_SHARED_COST = 150000;

void require(bool condition, const std::string& otherwise) {
    if (!condition) throw std::invalid_argument(otherwise);
}

std::string described(const LoraMatrix& matrix) {
    return "[" + std::to_string(matrix.num_rows) + ", " + std::to_string(matrix.num_columns) + "]";
}

int64_t most_ranks(const std::vector<std::optional<LoraSite>>& sites, const std::optional<LoraEmbedding>& embedding) {
    int64_t most = embedding ? embedding->slice.rank_end : 0;
    for (const auto& site : sites)
        if (site) most = std::max(most, site->num_ranks);
    return most;
}

const void* at(const void* elements, int64_t index, LoraDtype dtype) {
    return static_cast<const char*>(elements) + index * (dtype == LoraDtype::FLOAT32 ? 4 : 2);
}

void* at(void* elements, int64_t index, LoraDtype dtype) { return const_cast<void*>(at(const_cast<const void*>(elements), index, dtype)); }

const float* at(const float* values, int64_t index) { return values ? values + index : nullptr; }

// Calls visit(start, count) for each part of [0, size).
template <class Visit>
void split(int64_t size, int64_t part, Visit visit) {
    for (int64_t start = 0; start < size; start += part) visit(start, std::min(part, size - start));
}

}  // namespace

LoraKernel lora_kernel(Isa isa, LoraDtype dtype) {
    require(is_supported(isa), "this machine does not run the instruction set asked for");
#ifdef LORAMUX_X86
    if (isa >= Isa::AVX512_BF16) return lora_avx512_bf16(dtype);
    if (isa == Isa::AVX512) return lora_avx512(dtype);
    if (isa == Isa::AVX2) return lora_avx2(dtype);
#endif
    return lora_scalar(dtype);
}

LoraAdapter::LoraAdapter(std::vector<std::optional<LoraSite>> sites, std::optional<LoraEmbedding> embedding)
    : sites(std::move(sites)), embedding(std::move(embedding)), max_ranks(most_ranks(this->sites, this->embedding)) {}

LoraPlan::LoraPlan(std::vector<LoraSegment> segments, LoraDtype dtype, Isa isa, int num_threads)
    : segments_(std::move(segments)), dtype_(dtype), kernel_(lora_kernel(isa, dtype)), num_threads_(num_threads) {
    int64_t taken = 0;
    for (const auto& [start, end, adapter] : segments_) {
        require(taken <= start && start < end,
                "rows " + std::to_string(start) + " to " + std::to_string(end) + " are empty, or overlap those before");
        taken = end;
        max_ranks_ = std::max(max_ranks_, adapter->max_ranks);
    }
    shrunk_.reset(new float[taken * max_ranks_]);
}

void LoraPlan::apply(size_t site, const LoraMatrix& y, const LoraMatrix& x) {
    shrinks_.clear();
    expands_.clear();
    for (const auto& segment : segments_) {
        require(site < segment.adapter->sites.size(), "no site " + std::to_string(site));
        const auto& changed = segment.adapter->sites[site];
        if (!changed) continue;
        require(y.num_columns == changed->out_features && x.num_columns == changed->in_features && y.num_rows == x.num_rows &&
                    y.num_rows >= num_rows(),
                "y " + described(y) + " and x " + described(x) + " do not fit site " + std::to_string(site) + " and " +
                    std::to_string(num_rows()) + " rows");
        add_shrinks(segment, *changed, x);
        for (const auto& slice : changed->slices) add_expands(segment, slice, y);
    }
    run();
}

void LoraPlan::embed(const LoraMatrix& y, const int64_t* token_ids, int64_t num_tokens) {
    shrinks_.clear();
    expands_.clear();
    for (const auto& segment : segments_) {
        const auto& embedding = segment.adapter->embedding;
        if (!embedding) continue;
        require(y.num_columns == embedding->slice.out_end && y.num_rows == num_tokens && num_tokens >= num_rows(),
                "embeddings " + described(y) + " do not fit " + std::to_string(num_tokens) + " tokens and " + std::to_string(num_rows()) +
                    " rows");
        look_up(segment, *embedding, token_ids);
        add_expands(segment, embedding->slice, y);
    }
    run();
}

float* LoraPlan::shrunk(const LoraSegment& segment, int64_t rank) const {
    return shrunk_.get() + segment.start * max_ranks_ + rank * segment.num_rows();
}

void LoraPlan::add_shrinks(const LoraSegment& segment, const LoraSite& site, const LoraMatrix& x) {
    const void* first_row = at(static_cast<const void*>(x.elements), segment.start * site.in_features, dtype_);
    split(segment.num_rows(), PIECE_ROWS, [&](int64_t row, int64_t num_rows) {
        split(site.num_ranks, PIECE_RANKS, [&](int64_t rank, int64_t num_ranks) {
            shrinks_.add({at(first_row, row * site.in_features, dtype_), num_rows, site.in_features,
                          at(site.a, rank * site.in_features, dtype_), num_ranks, shrunk(segment, rank) + row, segment.num_rows()},
                         (num_rows + READ_COST) * num_ranks * site.in_features);
        });
    });
}

void LoraPlan::add_expands(const LoraSegment& segment, const LoraSlice& slice, const LoraMatrix& y) {
    const int64_t num_ranks = slice.rank_end - slice.rank_start, width = slice.out_end - slice.out_start;
    void* first_row = at(y.elements, segment.start * y.num_columns + slice.out_start, dtype_);
    split(segment.num_rows(), PIECE_ROWS, [&](int64_t row, int64_t num_rows) {
        split(width, PIECE_COLUMNS, [&](int64_t column, int64_t num_columns) {
            expands_.add({at(first_row, row * y.num_columns + column, dtype_), y.num_columns, num_rows,
                          shrunk(segment, slice.rank_start) + row, segment.num_rows(), num_ranks, at(slice.b, column, dtype_), width,
                          num_columns, at(slice.gain, column), at(slice.shift, column)},
                         (num_rows + READ_COST) * (num_ranks + 1) * num_columns);
        });
    });
}

void LoraPlan::look_up(const LoraSegment& segment, const LoraEmbedding& embedding, const int64_t* token_ids) {
    const int64_t num_ranks = embedding.slice.rank_end;
    for (int64_t row = 0; row < segment.num_rows(); ++row) {
        const int64_t token = token_ids[segment.start + row];
        require(0 <= token && token < embedding.vocab_size,
                "token " + std::to_string(token) + " of a vocabulary of " + std::to_string(embedding.vocab_size));
        const void* a = at(embedding.a, token * num_ranks, dtype_);
        for (int64_t rank = 0; rank < num_ranks; ++rank)
            shrunk(segment, rank)[row] = dtype_ == LoraDtype::FLOAT32 ? static_cast<const float*>(a)[rank]
                                                             : bfloat16_to_float(static_cast<const uint16_t*>(a)[rank]);
    }
}

void LoraPlan::run() {
    const int64_t total_cost = shrinks_.total_cost() + expands_.total_cost();
    if (total_cost == 0) return;
#pragma omp parallel num_threads(total_cost < MIN_SHARED_COST ? 1 : num_threads_)
    {
        shrinks_.run(kernel_.shrink, omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
        expands_.run(kernel_.expand, omp_get_thread_num(), omp_get_num_threads());
    }
}

}  // namespace loramux
