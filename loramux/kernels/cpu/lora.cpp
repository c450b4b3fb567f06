#include "lora.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bfloat16.h"
#include "scratch.h"

namespace loramux {

namespace {

// A piece of work: so many rows, which with what they are multiplied by fit a second-level cache, by so many ranks or columns.
constexpr int64_t PIECE_ROWS = 32;
constexpr int64_t PIECE_RANKS = 4;
constexpr int64_t PIECE_COLUMNS = 64;
// Reading a weight takes as long as multiplying it by so many rows, about.
constexpr int64_t READ_COST = 4;

void require(bool condition, const std::string& otherwise) {
    if (!condition) throw std::invalid_argument(otherwise);
}

std::string described(const Matrix& matrix) {
    return "[" + std::to_string(matrix.num_rows) + ", " + std::to_string(matrix.num_columns) + "]";
}

int64_t most_ranks(const std::vector<std::optional<LoraSite>>& sites, const std::optional<LoraEmbedding>& embedding) {
    int64_t most = embedding ? embedding->slice.rank_end : 0;
    for (const auto& site : sites)
        if (site) most = std::max(most, site->num_ranks);
    return most;
}

const void* at(const void* elements, int64_t index, Dtype dtype) { return static_cast<const char*>(elements) + index * itemsize(dtype); }

void* at(void* elements, int64_t index, Dtype dtype) { return const_cast<void*>(at(const_cast<const void*>(elements), index, dtype)); }

const float* at(const float* values, int64_t index) { return values ? values + index : nullptr; }

// Calls visit(start, count) for each part of [0, size).
template <class Visit>
void split(int64_t size, int64_t part, Visit visit) {
    for (int64_t start = 0; start < size; start += part) visit(start, std::min(part, size - start));
}

// As products read them (`matmul.h`).
Matrix with_padded_rows(const Matrix& x, Dtype dtype, Scratch& memory) {
    const int64_t stride = padded_inputs(x.num_columns), size = itemsize(dtype);
    auto* rows = static_cast<char*>(memory.reserve(x.num_rows * stride * size));
    for (int64_t row = 0; row < x.num_rows; ++row)
        std::memcpy(rows + row * stride * size, at(static_cast<const void*>(x.elements), row * x.stride, dtype), x.num_columns * size);
    return {rows, x.num_rows, x.num_columns, stride};
}

}  // namespace

LoraKernel lora_kernel(Isa isa, Dtype dtype) {
    require(is_supported(isa), "this machine does not run the instruction set asked for");
#ifdef LORAMUX_X86
    if (isa >= Isa::AVX512_BF16) return lora_avx512_bf16(dtype);
    if (isa == Isa::AVX512) return lora_avx512(dtype);
    if (isa == Isa::AVX2) return lora_avx2(dtype);
#endif
    return lora_portable(dtype);
}

LoraAdapter::LoraAdapter(std::vector<std::optional<LoraSite>> sites, std::optional<LoraEmbedding> embedding)
    : sites(std::move(sites)), embedding(std::move(embedding)), max_ranks(most_ranks(this->sites, this->embedding)) {}

LoraPlan::LoraPlan(std::vector<LoraSegment> segments, Dtype dtype, Isa isa)
    : segments_(std::move(segments)), dtype_(dtype), isa_(isa), kernel_(lora_kernel(isa, dtype)) {
    int64_t taken = 0;
    for (auto& each : segments_) {
        require(taken <= each.start && each.start < each.end,
                "rows " + std::to_string(each.start) + " to " + std::to_string(each.end) + " are empty, or overlap those before");
        taken = each.end;
        max_ranks_ = std::max(max_ranks_, each.adapter->max_ranks);
        each.is_long = LoraPanels::pay(each.num_rows(), dtype, isa);
        if (each.is_long)
            long_.push_back({each.adapter, std::make_unique<LoraPanels>(*each.adapter, each.start, each.num_rows(), kernel_, isa)});
    }
    shrunk_.reset(new float[taken * max_ranks_]);
}

bool LoraPlan::changes(size_t site) const {
    return std::any_of(segments_.begin(), segments_.end(), [&](const auto& segment) { return segment.adapter->sites[site].has_value(); });
}

bool LoraPlan::changes_embedding() const {
    return std::any_of(segments_.begin(), segments_.end(), [](const auto& segment) { return segment.adapter->embedding.has_value(); });
}

void LoraPlan::shrink(size_t site, const Matrix& x, const Member& member) {
    LoraShare share(member);
    for (const auto& segment : segments_) {
        const auto& changed = segment.adapter->sites[site];
        if (!changed || segment.is_long) continue;
        const int64_t size = changed->in_features;
        split(segment.num_rows(), PIECE_ROWS, [&](int64_t row, int64_t num_rows) {
            const void* first_row = at(static_cast<const void*>(x.elements), (segment.start + row) * x.stride, dtype_);
            split(changed->num_ranks, PIECE_RANKS, [&](int64_t rank, int64_t num_ranks) {
                if (!share.takes((num_rows + READ_COST) * num_ranks * size)) return;
                const void* a = at(changed->a, rank * size, dtype_);
                kernel_.shrink({first_row, x.stride, num_rows, size, a, num_ranks, shrunk(segment, rank) + row, segment.num_rows()});
            });
        });
    }
}

void LoraPlan::expand(size_t site, const Matrix& y, bool y_is_float32, const Member& member) {
    LoraShare share(member);
    for (const auto& segment : segments_) {
        const auto& changed = segment.adapter->sites[site];
        if (!changed || segment.is_long) continue;
        for (const auto& slice : changed->slices) expand(segment, slice, y, y_is_float32, share);
    }
}

void LoraPlan::update_embedding(const Matrix& y, const int64_t* token_ids, Member& member) {
    for (const auto& segment : segments_) {
        const auto& embedding = segment.adapter->embedding;
        if (!embedding) continue;
        const int64_t num_ranks = embedding->slice.rank_end;
        for (int64_t row = member.index; row < segment.num_rows(); row += member.count) {
            const void* a = at(embedding->a, token_ids[segment.start + row] * num_ranks, dtype_);
            for (int64_t rank = 0; rank < num_ranks; ++rank)
                shrunk(segment, rank)[row] = dtype_ == Dtype::FLOAT32 ? static_cast<const float*>(a)[rank]
                                                                      : bfloat16_to_float(static_cast<const Bfloat16*>(a)[rank].bits);
        }
    }
    member.meet();
    LoraShare share(member);
    for (const auto& segment : segments_)
        if (segment.adapter->embedding) expand(segment, segment.adapter->embedding->slice, y, false, share);
    member.meet();
}

void LoraPlan::expand(const LoraSegment& segment, const LoraSlice& slice, const Matrix& y, bool y_is_float32, LoraShare& share) const {
    const Dtype y_dtype = y_is_float32 ? Dtype::FLOAT32 : dtype_;
    const auto kernel = y_is_float32 ? kernel_.expand_float32 : kernel_.expand;
    const int64_t num_ranks = slice.rank_end - slice.rank_start, width = slice.out_end - slice.out_start;
    split(segment.num_rows(), PIECE_ROWS, [&](int64_t row, int64_t num_rows) {
        void* first_row = at(y.elements, (segment.start + row) * y.stride + slice.out_start, y_dtype);
        split(width, PIECE_COLUMNS, [&](int64_t column, int64_t num_columns) {
            if (!share.takes((num_rows + READ_COST) * (num_ranks + 1) * num_columns)) return;
            kernel({at(first_row, column, y_dtype), y.stride, num_rows, shrunk(segment, slice.rank_start) + row, segment.num_rows(),
                    num_ranks, at(slice.b, column, dtype_), width, num_columns, at(slice.gain, column), at(slice.shift, column)});
        });
    });
}

float* LoraPlan::shrunk(const LoraSegment& segment, int64_t rank) const {
    return shrunk_.get() + segment.start * max_ranks_ + rank * segment.num_rows();
}

void LoraPlan::apply(size_t site, const Matrix& y, const Matrix& x, int num_threads) {
    for (const auto& segment : segments_) {
        require(site < segment.adapter->sites.size(), "no site " + std::to_string(site));
        const auto& changed = segment.adapter->sites[site];
        require(!changed || (y.num_columns == changed->out_features && x.num_columns == changed->in_features && y.num_rows == x.num_rows &&
                             y.num_rows >= num_rows()),
                "y " + described(y) + " and x " + described(x) + " do not fit site " + std::to_string(site) + " and " +
                    std::to_string(num_rows()) + " rows");
    }
    Scratch memory;
    const Matrix padded = long_.empty() ? x : with_padded_rows(x, dtype_, memory);
    Team::run(num_threads, [&](Member& member) {
        begin_tiles(isa_);
        update(site, y, false, padded, member, [] {});
        end_tiles(isa_);
    });
}

void LoraPlan::embed(const Matrix& y, const int64_t* token_ids, int64_t num_tokens, int num_threads) {
    for (const auto& segment : segments_) {
        const auto& embedding = segment.adapter->embedding;
        if (!embedding) continue;
        require(y.num_columns == embedding->slice.out_end && y.num_rows == num_tokens && num_tokens >= num_rows(),
                "embeddings " + described(y) + " do not fit " + std::to_string(num_tokens) + " tokens and " + std::to_string(num_rows()) +
                    " rows");
        for (int64_t row = segment.start; row < segment.end; ++row)
            require(0 <= token_ids[row] && token_ids[row] < embedding->vocab_size,
                    "token " + std::to_string(token_ids[row]) + " of a vocabulary of " + std::to_string(embedding->vocab_size));
    }
    Team::run(num_threads, [&](Member& member) { update_embedding(y, token_ids, member); });
}

}  // namespace loramux
