// The products of `matmul.h` over a vector class V (`vectors.h`) and elements T, included once by the file of each instruction set.
#pragma once

#include <algorithm>

#include "matmul_kernels.h"
#include "vectors.h"

namespace loramux {

namespace {

constexpr int64_t PANEL_ROWS = 32;
// Packed columns of a tile, and its rows of x, stay in a first-level cache for so many inputs while a panel's rows pass.
constexpr int64_t CHUNK_INPUTS = 256;

// Sums of some rows and whole column blocks, row-major, on their way to y.
template <int ROWS, int COLUMNS>
struct Sums {
    alignas(64) float values[ROWS * COLUMNS];
};

// y = sums * scale + bias of columns [first, first + COLUMNS) of a product, as far as there are.
template <class V, class Y, int COLUMNS>
class Finish {
   public:
    template <class T>
    Finish(const Matmul& of, const T* bias, int64_t first)
        : y_(static_cast<Y*>(of.y) + first), y_stride_(of.y_stride), count_(std::min<int64_t>(COLUMNS, of.weight.out_features - first)) {
        gather(of.weight.scales, first, 1, scale_);
        gather(bias, first, 0, bias_);
    }

    void operator()(int64_t first_row, int64_t num_rows, const float* sums) const {
        for (int64_t row = 0; row < num_rows; ++row) finish(y_ + (first_row + row) * y_stride_, sums + row * COLUMNS);
    }

   private:
    template <class T>
    void gather(const T* of_columns, int64_t first, float otherwise, float* to) const {
        for (int i = 0; i < COLUMNS; i += V::W) {
            const int64_t left = count_ - i;
            V::store(to + i, !of_columns || left <= 0 ? V::all(otherwise)
                             : left < V::W           ? V::load(of_columns + first + i, left)
                                                     : V::load(of_columns + first + i));
        }
    }

    void finish(Y* y, const float* sums) const {
        for (int i = 0; i < COLUMNS; i += V::W) {
            const typename V::F values = V::multiply_add(V::load(sums + i), V::load(scale_ + i), V::load(bias_ + i));
            const int64_t left = count_ - i;
            if (left >= V::W)
                V::store(y + i, values);
            else if (left > 0)
                V::store(y + i, values, left);
        }
    }

    Y* y_;
    int64_t y_stride_;
    int64_t count_;
    alignas(64) float scale_[COLUMNS];
    alignas(64) float bias_[COLUMNS];
};

// BLOCKS column blocks of a packed weight, some inputs at a time, as elements T.
template <class V, class T, int BLOCKS>
class Columns {
   public:
    struct Chunk {
        const T* elements;
        int64_t block_size;
    };

    Columns(const PackedWeight& weight, int64_t block)
        : weight_(weight), block_size_(padded_inputs(weight.in_features) * BLOCK_COLUMNS), first_(block * block_size_) {}

    // Valid until the next call.
    Chunk at(int64_t input, int64_t num_inputs) {
        const int64_t first = first_ + input * BLOCK_COLUMNS;
        if (!weight_.scales) return {static_cast<const T*>(weight_.blocks) + first, block_size_};
        const auto* steps = static_cast<const int8_t*>(weight_.blocks) + first;
        constexpr int64_t SIZE = CHUNK_INPUTS * BLOCK_COLUMNS;
        for (int block = 0; block < BLOCKS; ++block)
            for (int64_t i = 0; i < num_inputs * BLOCK_COLUMNS; i += V::W)
                V::store(widened_ + block * SIZE + i, V::load(steps + block * block_size_ + i));
        return {widened_, SIZE};
    }

   private:
    const PackedWeight& weight_;
    const int64_t block_size_, first_;
    alignas(64) T widened_[BLOCKS * CHUNK_INPUTS * BLOCK_COLUMNS];
};

// sums += x W^T for ROWS rows and BLOCKS blocks, over `num_inputs` inputs.
template <class V, class T, int ROWS, int BLOCKS>
void add_tile(const T* x, int64_t x_stride, const T* weights, int64_t block_size, int64_t num_inputs, float* sums) {
    constexpr int OF_BLOCK = BLOCK_COLUMNS / V::W, VECTORS = BLOCKS * OF_BLOCK;
    typename V::F kept[ROWS][VECTORS];
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < VECTORS; ++i) kept[row][i] = V::load(sums + (row * VECTORS + i) * V::W);
    for (int64_t input = 0; input < num_inputs; input += VNNI<T>) {
        typename V::template Packed<T> columns[VECTORS];
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; ++i)
            columns[i] = V::load_packed(weights + i / OF_BLOCK * block_size + input * BLOCK_COLUMNS + i % OF_BLOCK * V::W * VNNI<T>);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const typename V::template Packed<T> factor = V::all_packed(x + row * x_stride + input);
#pragma GCC unroll 16
            for (int i = 0; i < VECTORS; ++i) kept[row][i] = V::dot(kept[row][i], factor, columns[i]);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < VECTORS; ++i) V::store(sums + (row * VECTORS + i) * V::W, kept[row][i]);
}

template <class V, class T, int ROWS, int BLOCKS>
void add_rows(const T* x, int64_t x_stride, int64_t num_rows, const T* weights, int64_t block_size, int64_t num_inputs, float* sums) {
    int64_t row = 0;
    for (; row + ROWS <= num_rows; row += ROWS)
        add_tile<V, T, ROWS, BLOCKS>(x + row * x_stride, x_stride, weights, block_size, num_inputs, sums + row * BLOCKS * BLOCK_COLUMNS);
    if constexpr (ROWS > 1)
        add_rows<V, T, ROWS / 2, BLOCKS>(x + row * x_stride, x_stride, num_rows - row, weights, block_size, num_inputs,
                                         sums + row * BLOCKS * BLOCK_COLUMNS);
}

// All rows of BLOCKS blocks.
template <class V, class T, class Y, int BLOCKS>
void multiply_panel(const Matmul& of, int64_t block) {
    constexpr int COLUMNS = BLOCKS * BLOCK_COLUMNS;
    const int64_t num_inputs = padded_inputs(of.weight.in_features);
    Columns<V, T, BLOCKS> columns(of.weight, block);
    const Finish<V, Y, COLUMNS> finish(of, static_cast<const T*>(of.bias), block * BLOCK_COLUMNS);
    for (int64_t row = 0; row < of.num_rows; row += PANEL_ROWS) {
        const int64_t num_rows = std::min(PANEL_ROWS, of.num_rows - row);
        const T* x = static_cast<const T*>(of.x) + row * of.x_stride;
        Sums<PANEL_ROWS, COLUMNS> sums;
        std::fill_n(sums.values, num_rows * COLUMNS, 0.0f);
        for (int64_t input = 0; input < num_inputs; input += CHUNK_INPUTS) {
            const int64_t count = std::min(CHUNK_INPUTS, num_inputs - input);
            const auto chunk = columns.at(input, count);
            add_rows<V, T, V::TILE_ROWS, BLOCKS>(x + input, of.x_stride, num_rows, chunk.elements, chunk.block_size, count, sums.values);
        }
        finish(row, num_rows, sums.values);
    }
}

template <class V, class T, class Y, int BLOCKS>
void multiply_blocks(const Matmul& of, int64_t block, int64_t end) {
    for (; block + BLOCKS <= end; block += BLOCKS) multiply_panel<V, T, Y, BLOCKS>(of, block);
    if constexpr (BLOCKS > 1) multiply_blocks<V, T, Y, BLOCKS - 1>(of, block, end);
}

template <class V, class T, class Y>
void multiply(const Matmul& of, int64_t first_block, int64_t end_block) {
    multiply_blocks<V, T, Y, V::TILE_BLOCKS>(of, first_block, end_block);
}

template <class V>
MatmulKernel matmul_over(Dtype dtype, bool y_is_float32) {
    if (dtype == Dtype::FLOAT32) return multiply<V, float, float>;
    return y_is_float32 ? multiply<V, Bfloat16, float> : multiply<V, Bfloat16, Bfloat16>;
}

}  // namespace

}  // namespace loramux
