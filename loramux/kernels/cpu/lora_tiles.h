// The kernels of `lora_kernel.h` over a vector type V, included once by the file of each instruction set.
//
// V multiplies x and A as Factors of WIDTH elements, summed in a Register of partial sums; it changes y by strips of COLUMNS columns, held
// in REGISTERS registers of float32. Everything here has internal linkage and no template of the standard library is used: a function
// compiled for one instruction set must not be the linker's choice for another.
#pragma once

#include <cstring>

#include "lora_kernel.h"

namespace loramux {

namespace {

constexpr int64_t MAX_WIDENED_RANKS = 128;
constexpr int TO_SECOND_LEVEL = 2;

template <class V>
typename V::Element* elements(void* address) {
    return static_cast<typename V::Element*>(address);
}

template <class V>
const typename V::Element* elements(const void* address) {
    return static_cast<const typename V::Element*>(address);
}

template <class V, int ROWS, int RANKS>
void add_products(typename V::Register (&sums)[ROWS][RANKS], const typename V::Element* x, int64_t x_stride, const typename V::Element* a,
                  int64_t a_stride) {
    typename V::Factor x_factors[ROWS];
    for (int row = 0; row < ROWS; ++row) x_factors[row] = V::load_factor(x + row * x_stride);
    for (int rank = 0; rank < RANKS; ++rank) {
        const typename V::Factor a_factor = V::load_factor(a + rank * a_stride);
        for (int row = 0; row < ROWS; ++row) sums[row][rank] = V::dot(sums[row][rank], x_factors[row], a_factor);
    }
}

// The last elements of each row, zeros after them.
template <class V, int ROWS>
void copy_tails(typename V::Element (&tails)[ROWS][V::WIDTH], const typename V::Element* rows, int64_t stride, int64_t count) {
    std::memset(tails, 0, sizeof tails);
    for (int row = 0; row < ROWS; ++row) std::memcpy(tails[row], rows + row * stride, count * sizeof(typename V::Element));
}

// The next tile's part of A is fetched meanwhile: its rows are short, and hardware that looks for streams finds each too late. So a core
// reads A at 8.0 GB/s instead of 5.6, of 12 that it streams.
template <class V, int ROWS, int RANKS>
void shrink_tile(const LoraShrink& of, int64_t row, int64_t rank) {
    const int64_t size = of.in_features;
    const auto* x = elements<V>(of.x) + row * size;
    const auto* a = elements<V>(of.a) + rank * size;
    typename V::Register sums[ROWS][RANKS] = {};
    const int64_t whole = size / V::WIDTH * V::WIDTH;
    for (int64_t i = 0; i < whole; i += V::WIDTH) {
        for (int next = RANKS; next < 2 * RANKS; ++next) __builtin_prefetch(a + next * size + i);
        add_products<V, ROWS, RANKS>(sums, x + i, size, a + i, size);
    }
    if (whole < size) {
        typename V::Element x_tails[ROWS][V::WIDTH], a_tails[RANKS][V::WIDTH];
        copy_tails<V, ROWS>(x_tails, x + whole, size, size - whole);
        copy_tails<V, RANKS>(a_tails, a + whole, size, size - whole);
        add_products<V, ROWS, RANKS>(sums, x_tails[0], V::WIDTH, a_tails[0], V::WIDTH);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int k = 0; k < RANKS; ++k) of.s[(rank + k) * of.s_stride + row + r] = V::total(sums[r][k]);
}

template <class V, int ROWS, int RANKS>
void shrink_rows(const LoraShrink& of, int64_t row, int64_t rank) {
    for (; row + ROWS <= of.num_rows; row += ROWS) shrink_tile<V, ROWS, RANKS>(of, row, rank);
    if constexpr (ROWS > 1) shrink_rows<V, ROWS / 2, RANKS>(of, row, rank);
}

// Rows innermost: a few rows of A stay in the first-level cache while every row of x passes.
template <class V, int RANKS>
void shrink_ranks(const LoraShrink& of, int64_t rank) {
    for (; rank + RANKS <= of.num_ranks; rank += RANKS) shrink_rows<V, V::SHRINK_ROWS, RANKS>(of, 0, rank);
    if constexpr (RANKS > 1) shrink_ranks<V, RANKS / 2>(of, rank);
}

template <class V>
void shrink(const LoraShrink& of) {
    shrink_ranks<V, V::SHRINK_RANKS>(of, 0);
}

// Columns [first, first + count): COLUMNS of them, or the fewer that are left at the end of a matrix.
template <class V, bool WHOLE>
struct Strip {
    int64_t first;
    int64_t count;

    template <class T>
    void load(const T* row, typename V::Register (&registers)[V::REGISTERS]) const {
        if constexpr (WHOLE) return V::load(row + first, registers);
        T padded[V::COLUMNS] = {};
        std::memcpy(padded, row + first, count * sizeof(T));
        V::load(padded, registers);
    }

    void store(typename V::Element* row, const typename V::Register (&registers)[V::REGISTERS]) const {
        if constexpr (WHOLE) return V::store(row + first, registers);
        typename V::Element padded[V::COLUMNS];
        V::store(padded, registers);
        std::memcpy(row + first, padded, count * sizeof(typename V::Element));
    }
};

// One row of y: gain * y + delta + shift.
template <class V, bool WHOLE>
[[gnu::always_inline]] inline void change_row(const LoraExpand& of, typename V::Element* row, Strip<V, WHOLE> strip,
                                              const typename V::Register (&delta)[V::REGISTERS]) {
    typename V::Register y[V::REGISTERS], vector[V::REGISTERS];
    strip.load(row, y);
    if (of.gain) {
        strip.load(of.gain, vector);
        for (int k = 0; k < V::REGISTERS; ++k) y[k] = V::multiply_add(vector[k], y[k], delta[k]);
    } else {
        for (int k = 0; k < V::REGISTERS; ++k) y[k] = V::add(y[k], delta[k]);
    }
    if (of.shift) {
        strip.load(of.shift, vector);
        for (int k = 0; k < V::REGISTERS; ++k) y[k] = V::add(y[k], vector[k]);
    }
    strip.store(row, y);
}

// Rows [row, row + ROWS); load_b(rank, registers) fetches the strip's row of B.
template <class V, int ROWS, bool WHOLE, class LoadB>
void expand_tile(const LoraExpand& of, int64_t row, Strip<V, WHOLE> strip, LoadB load_b) {
    typename V::Register sums[ROWS][V::REGISTERS] = {};
    const float* s = of.s + row;
    for (int64_t rank = 0; rank < of.num_ranks; ++rank, s += of.s_stride) {
        typename V::Register b[V::REGISTERS];
        load_b(rank, b);
        for (int r = 0; r < ROWS; ++r) {
            const typename V::Register factor = V::all(s[r]);
            for (int k = 0; k < V::REGISTERS; ++k) sums[r][k] = V::multiply_add(factor, b[k], sums[r][k]);
        }
    }
    for (int r = 0; r < ROWS; ++r) change_row(of, elements<V>(of.y) + (row + r) * of.y_stride, strip, sums[r]);
}

template <class V, int ROWS, bool WHOLE, class LoadB>
void expand_rows(const LoraExpand& of, int64_t row, Strip<V, WHOLE> strip, LoadB load_b) {
    for (; row + ROWS <= of.num_rows; row += ROWS) expand_tile<V, ROWS>(of, row, strip, load_b);
    if constexpr (ROWS > 1) expand_rows<V, ROWS / 2>(of, row, strip, load_b);
}

// Where several tiles of rows read a strip of B it is widened once, to one place: the rows of B lie a power of two apart or nearly so,
// where a first-level cache holds few of them. The next strip is fetched meanwhile, for the same reason to the second level: with 64 ranks
// a core so reads B at 7 to 10 GB/s instead of 3.7.
template <class V, bool WHOLE>
void expand_strip(const LoraExpand& of, Strip<V, WHOLE> strip) {
    const auto load = [&](int64_t rank, typename V::Register(&b)[V::REGISTERS]) {
        const auto* row = elements<V>(of.b) + rank * of.b_stride;
        __builtin_prefetch(row + strip.first + V::COLUMNS, 0, TO_SECOND_LEVEL);
        strip.load(row, b);
    };
    if (of.num_rows <= V::EXPAND_ROWS || of.num_ranks > MAX_WIDENED_RANKS) return expand_rows<V, V::EXPAND_ROWS>(of, 0, strip, load);
    typename V::Register widened[MAX_WIDENED_RANKS][V::REGISTERS];
    for (int64_t rank = 0; rank < of.num_ranks; ++rank) load(rank, widened[rank]);
    expand_rows<V, V::EXPAND_ROWS>(of, 0, strip, [&](int64_t rank, typename V::Register(&b)[V::REGISTERS]) {
        for (int k = 0; k < V::REGISTERS; ++k) b[k] = widened[rank][k];
    });
}

template <class V>
void expand(const LoraExpand& of) {
    const int64_t whole = of.num_columns / V::COLUMNS * V::COLUMNS;
    for (int64_t column = 0; column < whole; column += V::COLUMNS) expand_strip(of, Strip<V, true>{column, V::COLUMNS});
    if (whole < of.num_columns) expand_strip(of, Strip<V, false>{whole, of.num_columns - whole});
}

template <class Float32, class Bfloat16>
LoraKernel kernel_for(LoraDtype dtype) {
    if (dtype == LoraDtype::FLOAT32) return {shrink<Float32>, expand<Float32>};
    return {shrink<Bfloat16>, expand<Bfloat16>};
}

}  // namespace

}  // namespace loramux
