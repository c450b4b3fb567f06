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

// Vectors of BLOCKS column blocks as they lie in a weight of elements T.
template <class V, class T, int BLOCKS>
struct StoredColumns {
    static constexpr int OF_BLOCK = BLOCK_COLUMNS / V::W, VECTORS = BLOCKS * OF_BLOCK;

    const T* first;
    int64_t block_size;

    typename V::template Packed<T> load(int vector, int64_t input) const {
        return V::load_packed(first + vector / OF_BLOCK * block_size + input * BLOCK_COLUMNS + vector % OF_BLOCK * V::W * VNNI<T>);
    }
};

// The same of int8, widened as they are read. The next blocks are fetched meanwhile, for hardware stops at each page: so a row takes 6.4 ms
// for 135 MB instead of 9.1.
template <class V, class T, int BLOCKS>
struct SteppedColumns {
    static constexpr int OF_BLOCK = BLOCK_COLUMNS / V::W, VECTORS = BLOCKS * OF_BLOCK;

    const int8_t* first;
    int64_t block_size;

    typename V::template Packed<T> load(int vector, int64_t input) const {
        const int8_t* from = first + vector / OF_BLOCK * block_size + input * BLOCK_COLUMNS + vector % OF_BLOCK * V::W;
        __builtin_prefetch(from + BLOCKS * block_size, 0, TO_SECOND_LEVEL);
        return V::template widen_packed<T>(from, BLOCK_COLUMNS);
    }
};

// The same of int8, widened for a chunk of inputs.
template <class V, class T, int BLOCKS>
class WidenedColumns {
   public:
    static constexpr int OF_BLOCK = BLOCK_COLUMNS / V::W, VECTORS = BLOCKS * OF_BLOCK;

    void widen(const int8_t* first, int64_t block_size, int64_t num_inputs) {
        for (int64_t input = 0; input < num_inputs; input += VNNI<T>)
            for (int vector = 0; vector < VECTORS; ++vector)
                at(vector, input) = V::template widen_packed<T>(
                    first + vector / OF_BLOCK * block_size + input * BLOCK_COLUMNS + vector % OF_BLOCK * V::W, BLOCK_COLUMNS);
    }

    const typename V::template Packed<T>& load(int vector, int64_t input) const { return at_[input / VNNI<T> * VECTORS + vector]; }

   private:
    typename V::template Packed<T>& at(int vector, int64_t input) { return at_[input / VNNI<T> * VECTORS + vector]; }

    typename V::template Packed<T> at_[CHUNK_INPUTS / VNNI<T> * VECTORS];
};

// sums += x W^T for ROWS rows, over `num_inputs` inputs.
template <class V, class T, int ROWS, class Columns>
void add_tile(const T* x, int64_t x_stride, const Columns& columns, int64_t num_inputs, float* sums) {
    constexpr int VECTORS = Columns::VECTORS;
    typename V::F kept[ROWS][VECTORS];
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < VECTORS; ++i) kept[row][i] = V::load(sums + (row * VECTORS + i) * V::W);
    for (int64_t input = 0; input < num_inputs; input += VNNI<T>) {
        typename V::template Packed<T> vectors[VECTORS];
#pragma GCC unroll 16
        for (int i = 0; i < VECTORS; ++i) vectors[i] = columns.load(i, input);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const typename V::template Packed<T> factor = V::all_packed(x + row * x_stride + input);
#pragma GCC unroll 16
            for (int i = 0; i < VECTORS; ++i) kept[row][i] = V::dot(kept[row][i], factor, vectors[i]);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < VECTORS; ++i) V::store(sums + (row * VECTORS + i) * V::W, kept[row][i]);
}

template <class V, class T, int ROWS, class Columns>
void add_rows(const T* x, int64_t x_stride, int64_t num_rows, const Columns& columns, int64_t num_inputs, float* sums) {
    constexpr int64_t SUMS = Columns::VECTORS * V::W;
    int64_t row = 0;
    for (; row + ROWS <= num_rows; row += ROWS) add_tile<V, T, ROWS>(x + row * x_stride, x_stride, columns, num_inputs, sums + row * SUMS);
    if constexpr (ROWS > 1) add_rows<V, T, ROWS / 2>(x + row * x_stride, x_stride, num_rows - row, columns, num_inputs, sums + row * SUMS);
}

// All rows of BLOCKS blocks.
template <class V, class T, class Y, int BLOCKS>
void multiply_panel(const Matmul& of, int64_t block) {
    constexpr int COLUMNS = BLOCKS * BLOCK_COLUMNS;
    const int64_t num_inputs = padded_inputs(of.weight.in_features), block_size = num_inputs * BLOCK_COLUMNS;
    const Finish<V, Y, COLUMNS> finish(of, static_cast<const T*>(of.bias), block * BLOCK_COLUMNS);
    for (int64_t row = 0; row < of.num_rows; row += PANEL_ROWS) {
        const int64_t num_rows = std::min(PANEL_ROWS, of.num_rows - row);
        Sums<PANEL_ROWS, COLUMNS> sums;
        std::fill_n(sums.values, num_rows * COLUMNS, 0.0f);
        for (int64_t input = 0; input < num_inputs; input += CHUNK_INPUTS) {
            const int64_t count = std::min(CHUNK_INPUTS, num_inputs - input), first = block * block_size + input * BLOCK_COLUMNS;
            const T* x = static_cast<const T*>(of.x) + row * of.x_stride + input;
            if (of.weight.scales && num_rows <= V::TILE_ROWS) {
                const SteppedColumns<V, T, BLOCKS> columns{static_cast<const int8_t*>(of.weight.blocks) + first, block_size};
                add_rows<V, T, V::TILE_ROWS>(x, of.x_stride, num_rows, columns, count, sums.values);
            } else if (of.weight.scales) {
                WidenedColumns<V, T, BLOCKS> columns;
                columns.widen(static_cast<const int8_t*>(of.weight.blocks) + first, block_size, count);
                add_rows<V, T, V::TILE_ROWS>(x, of.x_stride, num_rows, columns, count, sums.values);
            } else {
                const StoredColumns<V, T, BLOCKS> columns{static_cast<const T*>(of.weight.blocks) + first, block_size};
                add_rows<V, T, V::TILE_ROWS>(x, of.x_stride, num_rows, columns, count, sums.values);
            }
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
