// The kernels of `lora_kernel.h` over a vector class V (`vectors.h`) and elements T, included once by the file of each instruction set.
//
// x and A are multiplied as packed operands, whose columns are here just neighbouring elements: the lanes of a sum are added in the end.
#pragma once

#include <cstring>

#include "lora_kernel.h"
#include "vectors.h"

namespace loramux {

namespace {

constexpr int64_t MAX_WIDENED_RANKS = 128;
constexpr int SHRINK_RANKS = 4;

template <class T>
const T* elements(const void* address) {
    return static_cast<const T*>(address);
}

template <class T>
T* elements(void* address) {
    return static_cast<T*>(address);
}

template <class V, class T, int ROWS, int RANKS>
[[gnu::always_inline]] inline void add_products(typename V::F (&sums)[ROWS][RANKS], const T* x, int64_t x_stride, const T* a,
                                                int64_t a_stride) {
    typename V::template Packed<T> factors[ROWS];
    for (int row = 0; row < ROWS; ++row) factors[row] = V::load_packed(x + row * x_stride);
    for (int rank = 0; rank < RANKS; ++rank) {
        const typename V::template Packed<T> factor = V::load_packed(a + rank * a_stride);
        for (int row = 0; row < ROWS; ++row) sums[row][rank] = V::dot(sums[row][rank], factors[row], factor);
    }
}

// The last elements of each row, zeros after them.
template <class T, int ROWS, int WIDTH>
void copy_tails(T (&tails)[ROWS][WIDTH], const T* rows, int64_t stride, int64_t count) {
    std::memset(tails, 0, sizeof tails);
    for (int row = 0; row < ROWS; ++row) std::memcpy(tails[row], rows + row * stride, count * sizeof(T));
}

// The next tile's part of A is fetched meanwhile: its rows are short, and hardware that looks for streams finds each too late. So a core
// reads A at 8.0 GB/s instead of 5.6, of 12 that it streams.
template <class V, class T, int ROWS, int RANKS>
void shrink_tile(const LoraShrink& of, int64_t row, int64_t rank) {
    constexpr int WIDTH = V::W * VNNI<T>;
    const int64_t size = of.in_features, whole = size / WIDTH * WIDTH;
    const auto* x = elements<T>(of.x) + row * of.x_stride;
    const auto* a = elements<T>(of.a) + rank * size;
    typename V::F sums[ROWS][RANKS];
    for (auto& of_row : sums)
        for (auto& sum : of_row) sum = V::all(0);
    for (int64_t i = 0; i < whole; i += WIDTH) {
        for (int next = RANKS; next < 2 * RANKS; ++next) __builtin_prefetch(a + next * size + i);
        add_products<V, T, ROWS, RANKS>(sums, x + i, of.x_stride, a + i, size);
    }
    if (whole < size) {
        T x_tails[ROWS][WIDTH], a_tails[RANKS][WIDTH];
        copy_tails(x_tails, x + whole, of.x_stride, size - whole);
        copy_tails(a_tails, a + whole, size, size - whole);
        add_products<V, T, ROWS, RANKS>(sums, x_tails[0], WIDTH, a_tails[0], WIDTH);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int k = 0; k < RANKS; ++k) of.s[(rank + k) * of.s_stride + row + r] = V::total(sums[r][k]);
}

template <class V, class T, int ROWS, int RANKS>
void shrink_rows(const LoraShrink& of, int64_t row, int64_t rank) {
    for (; row + ROWS <= of.num_rows; row += ROWS) shrink_tile<V, T, ROWS, RANKS>(of, row, rank);
    if constexpr (ROWS > 1) shrink_rows<V, T, ROWS / 2, RANKS>(of, row, rank);
}

// Rows innermost: a few rows of A stay in the first-level cache while every row of x passes.
template <class V, class T, int RANKS>
void shrink_ranks(const LoraShrink& of, int64_t rank) {
    for (; rank + RANKS <= of.num_ranks; rank += RANKS) shrink_rows<V, T, V::TILE_ROWS / 2, RANKS>(of, 0, rank);
    if constexpr (RANKS > 1) shrink_ranks<V, T, RANKS / 2>(of, rank);
}

template <class V, class T>
void shrink(const LoraShrink& of) {
    shrink_ranks<V, T, SHRINK_RANKS>(of, 0);
}

// Columns [first, first + count) of a row: two vectors of them, or the fewer that are left at the end of a matrix.
template <class V, bool WHOLE>
struct Strip {
    static constexpr int COLUMNS = 2 * V::W;
    struct Values {
        typename V::F part[2];
    };

    int64_t first;
    int64_t count;

    template <class T>
    Values load(const T* row) const {
        if constexpr (WHOLE) return {{V::load(row + first), V::load(row + first + V::W)}};
        T padded[COLUMNS] = {};
        std::memcpy(padded, row + first, count * sizeof(T));
        return {{V::load(padded), V::load(padded + V::W)}};
    }

    template <class T>
    void store(T* row, const Values& values) const {
        T padded[COLUMNS];
        T* to = WHOLE ? row + first : padded;
        for (int k = 0; k < 2; ++k) V::store(to + k * V::W, values.part[k]);
        if constexpr (!WHOLE) std::memcpy(row + first, padded, count * sizeof(T));
    }
};

// One row of y: gain * y + delta + shift. `By` has gain and shift.
template <class V, class Y, class By, bool WHOLE>
[[gnu::always_inline]] inline void change_row(const By& by, Y* row, Strip<V, WHOLE> strip, const typename V::F (&delta)[2]) {
    auto y = strip.load(row);
    if (by.gain) {
        const auto gain = strip.load(by.gain);
        for (int k = 0; k < 2; ++k) y.part[k] = V::multiply_add(gain.part[k], y.part[k], delta[k]);
    } else {
        for (int k = 0; k < 2; ++k) y.part[k] = V::add(y.part[k], delta[k]);
    }
    if (by.shift) {
        const auto shift = strip.load(by.shift);
        for (int k = 0; k < 2; ++k) y.part[k] = V::add(y.part[k], shift.part[k]);
    }
    strip.store(row, y);
}

// Calls visit(strip) for each strip of a row.
template <class V, class Visit>
void each_strip(int64_t num_columns, Visit visit) {
    constexpr int COLUMNS = Strip<V, true>::COLUMNS;
    const int64_t whole = num_columns / COLUMNS * COLUMNS;
    for (int64_t column = 0; column < whole; column += COLUMNS) visit(Strip<V, true>{column, COLUMNS});
    if (whole < num_columns) visit(Strip<V, false>{whole, num_columns - whole});
}

// Rows [row, row + ROWS); load_b(rank) fetches the strip's row of B.
template <class V, class Y, int ROWS, bool WHOLE, class LoadB>
void expand_tile(const LoraExpand& of, int64_t row, Strip<V, WHOLE> strip, LoadB load_b) {
    typename V::F sums[ROWS][2];
    for (auto& of_row : sums)
        for (auto& sum : of_row) sum = V::all(0);
    const float* s = of.s + row;
    for (int64_t rank = 0; rank < of.num_ranks; ++rank, s += of.s_stride) {
        const auto b = load_b(rank);
        for (int r = 0; r < ROWS; ++r) {
            const typename V::F factor = V::all(s[r]);
            for (int k = 0; k < 2; ++k) sums[r][k] = V::multiply_add(factor, b.part[k], sums[r][k]);
        }
    }
    for (int r = 0; r < ROWS; ++r) change_row<V>(of, elements<Y>(of.y) + (row + r) * of.y_stride, strip, sums[r]);
}

template <class V, class Y, int ROWS, bool WHOLE, class LoadB>
void expand_rows(const LoraExpand& of, int64_t row, Strip<V, WHOLE> strip, LoadB load_b) {
    for (; row + ROWS <= of.num_rows; row += ROWS) expand_tile<V, Y, ROWS>(of, row, strip, load_b);
    if constexpr (ROWS > 1) expand_rows<V, Y, ROWS / 2>(of, row, strip, load_b);
}

// Where several tiles of rows read a strip of B it is widened once, to one place: the rows of B lie a power of two apart or nearly so,
// where a first-level cache holds few of them. The next strip is fetched meanwhile, for the same reason to the second level: with 64 ranks
// a core so reads B at 7 to 10 GB/s instead of 3.7.
template <class V, class T, class Y, bool WHOLE>
void expand_strip(const LoraExpand& of, Strip<V, WHOLE> strip) {
    const auto load = [&](int64_t rank) {
        const auto* row = elements<T>(of.b) + rank * of.b_stride;
        __builtin_prefetch(row + strip.first + strip.COLUMNS, 0, TO_SECOND_LEVEL);
        return strip.load(row);
    };
    if (of.num_rows <= V::TILE_ROWS || of.num_ranks > MAX_WIDENED_RANKS) return expand_rows<V, Y, V::TILE_ROWS>(of, 0, strip, load);
    typename Strip<V, WHOLE>::Values widened[MAX_WIDENED_RANKS];
    for (int64_t rank = 0; rank < of.num_ranks; ++rank) widened[rank] = load(rank);
    expand_rows<V, Y, V::TILE_ROWS>(of, 0, strip, [&](int64_t rank) { return widened[rank]; });
}

template <class V, class T, class Y>
void expand(const LoraExpand& of) {
    each_strip<V>(of.num_columns, [&](auto strip) { expand_strip<V, T, Y>(of, strip); });
}

template <class V, class Y>
void change(const LoraChange& of) {
    for (int64_t row = 0; row < of.num_rows; ++row)
        each_strip<V>(of.num_columns, [&](auto strip) {
            change_row<V>(of, elements<Y>(of.y) + row * of.y_stride, strip, strip.load(of.delta + row * of.delta_stride).part);
        });
}

template <class V>
LoraKernel lora_kernel_over(Dtype dtype) {
    if (dtype == Dtype::FLOAT32)
        return {shrink<V, float>, expand<V, float, float>, expand<V, float, float>, change<V, float>, change<V, float>};
    return {shrink<V, Bfloat16>, expand<V, Bfloat16, Bfloat16>, expand<V, Bfloat16, float>, change<V, Bfloat16>, change<V, float>};
}

}  // namespace

}  // namespace loramux
