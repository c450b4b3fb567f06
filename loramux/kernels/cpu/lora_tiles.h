// The kernels of `lora_kernel.h` over a vector type V, included once by the file of each instruction set.
//
// V works on WIDTH elements at a time: as a Factor in dot products, as a Lanes in float32 elsewhere. Everything here has internal
// linkage and no template of the standard library is used: a function compiled for one instruction set must not be the linker's choice
// for another.
#pragma once

#include <cstring>

#include "lora_kernel.h"

namespace loramux {

namespace {

template <class V>
typename V::Element* elements(void* address) {
    return static_cast<typename V::Element*>(address);
}

template <class V>
const typename V::Element* elements(const void* address) {
    return static_cast<const typename V::Element*>(address);
}

template <class V, int ROWS, int RANKS>
void add_products(typename V::Sum (&sums)[ROWS][RANKS], const typename V::Element* x, int64_t x_stride, const typename V::Element* a,
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

template <class V, int ROWS, int RANKS>
void shrink_tile(const LoraShrink& of, int64_t row, int64_t rank) {
    const int64_t size = of.in_features;
    const auto* x = elements<V>(of.x) + row * size;
    const auto* a = elements<V>(of.a) + rank * size;
    typename V::Sum sums[ROWS][RANKS] = {};
    const int64_t whole = size / V::WIDTH * V::WIDTH;
    for (int64_t i = 0; i < whole; i += V::WIDTH) add_products<V, ROWS, RANKS>(sums, x + i, size, a + i, size);
    if (whole < size) {
        typename V::Element x_tails[ROWS][V::WIDTH], a_tails[RANKS][V::WIDTH];
        copy_tails<V, ROWS>(x_tails, x + whole, size, size - whole);
        copy_tails<V, RANKS>(a_tails, a + whole, size, size - whole);
        add_products<V, ROWS, RANKS>(sums, x_tails[0], V::WIDTH, a_tails[0], V::WIDTH);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int k = 0; k < RANKS; ++k) of.s[(row + r) * of.s_stride + rank + k] = V::total(sums[r][k]);
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

// A strip of at most WIDTH columns; the last one of a matrix may be narrower.
template <class V, bool WHOLE>
struct Strip {
    int64_t first;
    int64_t count;

    template <class T>
    typename V::Lanes load(const T* row) const {
        if constexpr (WHOLE) return V::load(row + first);
        T padded[V::WIDTH] = {};
        std::memcpy(padded, row + first, count * sizeof(T));
        return V::load(padded);
    }

    void store(typename V::Element* row, typename V::Lanes lanes) const {
        if constexpr (WHOLE) return V::store(row + first, lanes);
        typename V::Element padded[V::WIDTH];
        V::store(padded, lanes);
        std::memcpy(row + first, padded, count * sizeof(typename V::Element));
    }
};

template <class V, int ROWS, bool WHOLE>
void expand_tile(const LoraExpand& of, int64_t row, Strip<V, WHOLE> strip) {
    typename V::Lanes sums[ROWS] = {};
    const float* s = of.s + row * of.s_stride;
    const auto* b = elements<V>(of.b);
    for (int64_t rank = 0; rank < of.num_ranks; ++rank, b += of.b_stride) {
        const typename V::Lanes b_lanes = strip.load(b);
        for (int r = 0; r < ROWS; ++r) sums[r] = V::multiply_add(V::all(s[r * of.s_stride + rank]), b_lanes, sums[r]);
    }
    for (int r = 0; r < ROWS; ++r) {
        auto* y = elements<V>(of.y) + (row + r) * of.y_stride;
        const typename V::Lanes before = strip.load(y);
        typename V::Lanes after = of.gain ? V::multiply_add(strip.load(of.gain), before, sums[r]) : V::add(before, sums[r]);
        if (of.shift) after = V::add(after, strip.load(of.shift));
        strip.store(y, after);
    }
}

template <class V, int ROWS, bool WHOLE>
void expand_rows(const LoraExpand& of, int64_t row, Strip<V, WHOLE> strip) {
    for (; row + ROWS <= of.num_rows; row += ROWS) expand_tile<V, ROWS, WHOLE>(of, row, strip);
    if constexpr (ROWS > 1) expand_rows<V, ROWS / 2, WHOLE>(of, row, strip);
}

// Rows innermost: a strip of B stays in the first-level cache while every row of y passes.
template <class V>
void expand(const LoraExpand& of) {
    const int64_t whole = of.num_columns / V::WIDTH * V::WIDTH;
    for (int64_t column = 0; column < whole; column += V::WIDTH)
        expand_rows<V, V::EXPAND_ROWS, true>(of, 0, Strip<V, true>{column, V::WIDTH});
    if (whole < of.num_columns) expand_rows<V, V::EXPAND_ROWS, false>(of, 0, Strip<V, false>{whole, of.num_columns - whole});
}

template <class Float32, class Bfloat16>
LoraKernel kernel_for(LoraDtype dtype) {
    if (dtype == LoraDtype::FLOAT32) return {shrink<Float32>, expand<Float32>};
    return {shrink<Bfloat16>, expand<Bfloat16>};
}

}  // namespace

}  // namespace loramux
