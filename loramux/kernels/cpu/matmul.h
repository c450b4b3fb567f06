// y = x W^T + b over weights packed once, some columns at a time.
#pragma once

#include "dtype.h"
#include "isa.h"

namespace loramux {

constexpr int64_t BLOCK_COLUMNS = 16;
// Rows of x and packed columns are as long as a multiple of this, zeros at the end: whole cache lines, whole AMX tiles.
constexpr int64_t INPUT_ALIGN = 32;

inline int64_t padded_inputs(int64_t in_features) { return (in_features + INPUT_ALIGN - 1) / INPUT_ALIGN * INPUT_ALIGN; }
inline int64_t num_column_blocks(int64_t out_features) { return (out_features + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS; }

// W [out_features, in_features] as [column blocks][padded inputs / VNNI][BLOCK_COLUMNS][VNNI], zeros where W ends; 64-byte aligned.
// Elements are of the dtype that products are computed in. Where there are scales [out_features] they are int8, W is each row times its
// scale, and the form is [column blocks][padded inputs][BLOCK_COLUMNS].
struct PackedWeight {
    const void* blocks;
    int64_t out_features;
    int64_t in_features;
    Dtype dtype;
    const float* scales = nullptr;
};

// Of the packed form; its first byte is at a multiple of 64, in memory or in a file.
int64_t packed_weight_bytes(int64_t out_features, int64_t in_features, Dtype dtype, bool is_int8);

// weight [out_features, in_features], contiguous, of the dtype or int8; packed of packed_weight_bytes.
void pack_weight(const void* weight, int64_t out_features, int64_t in_features, Dtype dtype, bool is_int8, void* packed);

// Row `row` of W, [in_features] of its dtype: as it was before packing, or as near to int8 times its scale as the dtype comes.
void unpack_row(const PackedWeight& weight, int64_t row, void* to);

// x [num_rows, padded inputs] of W's dtype, rows x_stride elements apart, zeros past the inputs; bias of W's dtype, or null. y
// [num_rows, out_features], rows y_stride elements apart, in W's dtype or float32 as the kernel is asked for. x and y don't overlap.
struct Matmul {
    const void* x;
    int64_t x_stride;
    int64_t num_rows;
    PackedWeight weight;
    const void* bias;
    void* y;
    int64_t y_stride;
};

// Computes the columns of blocks [first_block, end_block): sums in float32, rounded once to nearest even. Threads take different blocks
// of one product. A column's sums don't depend on which blocks are asked for together, nor a row's on its neighbours beyond what the
// number of rows chooses.
using MatmulKernel = void (*)(const Matmul& of, int64_t first_block, int64_t end_block);

// With AMX a thread has called `begin_tiles` before and `end_tiles` after its products.
// Throws std::invalid_argument for an instruction set that this machine does not run.
MatmulKernel matmul_kernel(Isa isa, Dtype dtype, bool y_is_float32);

// A thread's AMX tiles, configured once for all products; nothing on other instruction sets.
void begin_tiles(Isa isa);
void end_tiles(Isa isa);

// A whole product on num_threads threads.
void matmul(const Matmul& of, Isa isa, bool y_is_float32, int num_threads);

}  // namespace loramux
