// One piece of attention, as each instruction set computes it.
#pragma once

#include "dtype.h"
#include "isa.h"

namespace loramux {

// Sizes of one layer's attention. num_heads is a multiple of num_kv_heads; head_dim is even.
struct AttentionShape {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    // A token sees this many tokens, itself included; 0 is all before it.
    int64_t window;
    float scale;
    Dtype dtype;
};

// One layer's keys and values. Each KV block has, head by head, a packed operand (`vectors.h`) for the products it is read by:
//     k [num_blocks, num_kv_heads, head_dim / VNNI, block_size, VNNI]
//     v [num_blocks, num_kv_heads, block_size / VNNI, head_dim, VNNI]
// Every element is finite: attention reads masked cells.
struct KvCache {
    void* k;
    void* v;
};

// A piece has the query rows of one key head: row r is head r % group of those that share the key head, of the sequence's token r / group.
constexpr int64_t MAX_PIECE_ROWS = 32;
constexpr int64_t MAX_HEAD_DIM = 512;

// Rows [first_row, first_row + num_rows) of a sequence over its keys [key_begin, key_end), as far as each row sees them. q and out are the
// sequence's first token, at first_position; blocks its block table. Where the keys are a part of what the rows see, `partial` takes the
// sums: for each row the highest score, the sum of weights relative to it, and the weighted sum of values [head_dim].
struct AttentionPiece {
    const void* q;
    int64_t q_stride;
    void* out;
    int64_t out_stride;
    const KvCache* cache;
    const int64_t* blocks;
    int64_t kv_head;
    int64_t first_row;
    int64_t num_rows;
    int64_t first_position;
    int64_t key_begin;
    int64_t key_end;
    float* partial;
};

inline int64_t partial_size(const AttentionShape& shape) { return shape.head_dim + 2; }

// Joins num_parts partial results, part_stride floats apart, to num_rows rows of out, which starts at the sequence's first token. A
// part's highest scores are overwritten.
struct AttentionJoin {
    float* partial;
    int64_t part_stride;
    int64_t num_parts;
    void* out;
    int64_t out_stride;
    int64_t kv_head;
    int64_t first_row;
    int64_t num_rows;
};

struct AttentionKernel {
    void (*attend)(const AttentionShape&, const AttentionPiece&);
    void (*join)(const AttentionShape&, const AttentionJoin&);
};

// Of one instruction set; defined in the file of that name.
AttentionKernel attention_portable(Dtype dtype);
#ifdef LORAMUX_X86
AttentionKernel attention_avx2(Dtype dtype);
AttentionKernel attention_avx512(Dtype dtype);
AttentionKernel attention_avx512_bf16(Dtype dtype);
AttentionKernel attention_amx(Dtype dtype);
#endif

}  // namespace loramux
