#include "lora_panels.h"

#include <algorithm>

namespace loramux {

namespace {

// Packing reads and writes the weights once, as a decoding row would read them.
constexpr int64_t LEAST_ROWS = 32;
constexpr int64_t PIECE_ROWS = 64;
constexpr int64_t PIECE_COLUMNS = 64;
constexpr int64_t PIECE_RANKS = 2 * BLOCK_COLUMNS;

int64_t num_ranks(const LoraSlice& slice) { return slice.rank_end - slice.rank_start; }
int64_t width(const LoraSlice& slice) { return slice.out_end - slice.out_start; }
int64_t num_terms(const LoraSlice& slice) { return padded_inputs(2 * num_ranks(slice)); }
int64_t packed_elements(int64_t out_features, int64_t in_features) {
    return packed_weight_bytes(out_features, in_features, Dtype::BFLOAT16, false) / itemsize(Dtype::BFLOAT16);
}
int64_t a_elements(const LoraSite& site) { return packed_elements(site.num_ranks, site.in_features); }
int64_t b_elements(const LoraSlice& slice) { return packed_elements(width(slice), num_terms(slice)); }

template <class Of>
int64_t sum_over(const LoraSite& site, Of of) {
    int64_t sum = 0;
    for (const auto& slice : site.slices) sum += of(slice);
    return sum;
}

// [B; B] packed; b [num_ranks, width].
void pack_b(const LoraSlice& slice, Bfloat16* to) {
    const int64_t ranks = num_ranks(slice), columns = width(slice), pairs = num_terms(slice) / 2;
    const auto* b = static_cast<const Bfloat16*>(slice.b);
    const auto element = [&](int64_t term, int64_t column) {
        return term < 2 * ranks && column < columns ? b[term % ranks * columns + column] : Bfloat16{0};
    };
    for (int64_t block = 0; block < num_column_blocks(columns); ++block)
        for (int64_t pair = 0; pair < pairs; ++pair)
            for (int64_t i = 0; i < BLOCK_COLUMNS; ++i, to += 2) {
                to[0] = element(2 * pair, block * BLOCK_COLUMNS + i);
                to[1] = element(2 * pair + 1, block * BLOCK_COLUMNS + i);
            }
}

// Some of a row's s into two terms each, the second `distance` after the first.
void split_terms(const float* s, int64_t count, Bfloat16* terms, int64_t distance) {
    for (int64_t i = 0; i < count; ++i) {
        const uint16_t high = float_to_bfloat16(s[i]);
        terms[i].bits = high;
        terms[i + distance].bits = float_to_bfloat16(s[i] - bfloat16_to_float(high));
    }
}

// Calls work(start, count) for this member's parts of [0, size).
template <class Work>
void each_own(int64_t size, int64_t part, const Member& member, Work work) {
    for (int64_t start = member.index * part; start < size; start += member.count * part) work(start, std::min(part, size - start));
}

}  // namespace

bool LoraPanels::pay(int64_t num_rows, Dtype dtype, Isa isa) {
    return dtype == Dtype::BFLOAT16 && isa >= Isa::AVX512_BF16 && num_rows >= LEAST_ROWS;
}

LoraPanels::LoraPanels(const LoraAdapter& adapter, int64_t first_row, int64_t num_rows, LoraKernel kernel, Isa isa)
    : first_row_(first_row), num_rows_(num_rows), kernel_(kernel), matmul_(matmul_kernel(isa, Dtype::BFLOAT16, true)) {
    int64_t a = 0, b = 0, terms = 0;
    for (const auto& site : adapter.sites) {
        if (!site) continue;
        a = std::max(a, a_elements(*site));
        b = std::max(b, sum_over(*site, b_elements));
        terms = std::max(terms, sum_over(*site, num_terms));
    }
    a_ = static_cast<Bfloat16*>(a_memory_.reserve(a * sizeof(Bfloat16)));
    b_ = static_cast<Bfloat16*>(b_memory_.reserve(b * sizeof(Bfloat16)));
    terms_ = static_cast<Bfloat16*>(terms_memory_.reserve(num_rows * terms * sizeof(Bfloat16)));
}

void LoraPanels::pack(const LoraSite& site, const Member& member) {
    if (member.index == 0 && site.num_ranks) pack_weight(site.a, site.num_ranks, site.in_features, Dtype::BFLOAT16, false, a_);
    Bfloat16* to = b_;
    int64_t index = 1;
    for (const auto& slice : site.slices) {
        if (index++ % member.count == member.index) pack_b(slice, to);
        to += b_elements(slice);
    }
}

void LoraPanels::shrink(const LoraSite& site, const Matrix& x, const Member& member) {
    if (!site.num_ranks) return;
    each_own(num_rows_, PIECE_ROWS, member, [&](int64_t row, int64_t num_rows) { shrink_part(site, x, row, num_rows); });
}

// Some ranks at a time, whatever slices they are of.
void LoraPanels::shrink_part(const LoraSite& site, const Matrix& x, int64_t row, int64_t num_rows) {
    float s[PIECE_ROWS * PIECE_RANKS];
    const auto* first = static_cast<const Bfloat16*>(x.elements) + (first_row_ + row) * x.stride;
    const int64_t rank_elements = padded_inputs(site.in_features), stride = sum_over(site, num_terms);
    // Another site's terms may lie in the padding, and 0 * NaN is NaN.
    std::fill(terms_ + row * stride, terms_ + (row + num_rows) * stride, Bfloat16{0});
    for (int64_t begin = 0; begin < site.num_ranks; begin += PIECE_RANKS) {
        const int64_t end = std::min(begin + PIECE_RANKS, site.num_ranks);
        const PackedWeight a{a_ + begin * rank_elements, end - begin, site.in_features, Dtype::BFLOAT16};
        matmul_({first, x.stride, num_rows, a, nullptr, s, PIECE_RANKS}, 0, num_column_blocks(end - begin));
        Bfloat16* terms = terms_ + row * stride;
        for (const auto& slice : site.slices) {
            const int64_t from = std::max(begin, slice.rank_start), to = std::min(end, slice.rank_end);
            for (int64_t i = 0; i < num_rows && from < to; ++i)
                split_terms(s + i * PIECE_RANKS + from - begin, to - from, terms + i * stride + from - slice.rank_start, num_ranks(slice));
            terms += num_terms(slice);
        }
    }
}

void LoraPanels::expand(const LoraSite& site, const Matrix& y, bool y_is_float32, const Member& member) {
    const int64_t stride = sum_over(site, num_terms);
    const Bfloat16 *terms = terms_, *b = b_;
    for (const auto& slice : site.slices) {
        each_own(width(slice), PIECE_COLUMNS, member, [&](int64_t column, int64_t num_columns) {
            for (int64_t row = 0; row < num_rows_; row += PIECE_ROWS)
                expand_part(slice, {terms + row * stride, stride, std::min(PIECE_ROWS, num_rows_ - row)}, b, y, y_is_float32, row, column,
                            num_columns);
        });
        terms += num_terms(slice);
        b += b_elements(slice);
    }
}

void LoraPanels::expand_part(const LoraSlice& slice, Terms terms, const Bfloat16* b, const Matrix& y, bool y_is_float32, int64_t row,
                             int64_t column, int64_t num_columns) {
    float delta[PIECE_ROWS * PIECE_COLUMNS];
    const PackedWeight part{b + column * num_terms(slice), num_columns, num_terms(slice), Dtype::BFLOAT16};
    if (num_ranks(slice)) {
        matmul_({terms.elements, terms.stride, terms.num_rows, part, nullptr, delta, PIECE_COLUMNS}, 0, num_column_blocks(num_columns));
    } else {
        std::fill(delta, delta + terms.num_rows * PIECE_COLUMNS, 0.0f);
    }
    const int64_t element = (first_row_ + row) * y.stride + slice.out_start + column;
    void* to = y_is_float32 ? static_cast<void*>(static_cast<float*>(y.elements) + element)
                            : static_cast<void*>(static_cast<Bfloat16*>(y.elements) + element);
    const auto change = y_is_float32 ? kernel_.change_float32 : kernel_.change;
    change({to, y.stride, terms.num_rows, delta, PIECE_COLUMNS, num_columns, slice.gain ? slice.gain + column : nullptr,
            slice.shift ? slice.shift + column : nullptr});
}

}  // namespace loramux
