#include <immintrin.h>

#include "amx_tiles.h"
#include "attention_tiles.h"
#include "vectors_avx512.h"

namespace loramux {

namespace {

// The products of a piece of many rows by tiles, two of rows at a time. head_dim and block_size are multiples of TILE_INPUTS.
struct TileProducts {
    using Vectors = Avx512;
    using Element = Bfloat16;
    static constexpr int UNIT = TILE_INPUTS;

    static bool take(const AttentionShape& shape, int64_t num_rows) {
        return num_rows > FEW_ROWS && shape.head_dim % TILE_INPUTS == 0 && shape.block_size % TILE_INPUTS == 0;
    }

    static int64_t padded_rows(int64_t num_rows) { return (num_rows + TILE_SIZE - 1) / TILE_SIZE * TILE_SIZE; }

    static void score(const AttentionShape& shape, int64_t num_rows, const Bfloat16* queries, const KeyUnits<Bfloat16, UNIT>& keys,
                      float* scores, int64_t scores_stride) {
        const Operand q{queries, shape.head_dim};
        const int64_t k_stride = shape.block_size * VNNI<Bfloat16>;
        for (int64_t unit = 0; unit < keys.count; ++unit)
            each_pair(num_rows, [&](auto two_rows, int64_t row) {
                zero<two_rows>();
                for (int64_t input = 0; input < shape.head_dim; input += TILE_INPUTS)
                    add<two_rows>(q.at(row, input), {keys.k[unit] + input / VNNI<Bfloat16> * k_stride, k_stride});
                store<two_rows>(scores + row * scores_stride + unit * UNIT, scores_stride);
            });
    }

    static void add_values(const AttentionShape& shape, int64_t num_rows, const Bfloat16* weights, int64_t weights_stride,
                           const KeyUnits<Bfloat16, UNIT>& keys, const float* decay, float* sums) {
        const Operand w{weights, weights_stride};
        const int64_t size = shape.head_dim;
        scale(num_rows, size, decay, sums);
        for (int64_t column = 0; column < size; column += UNIT)
            each_pair(num_rows, [&](auto two_rows, int64_t row) {
                float* to = sums + row * size + column;
                load<two_rows>(to, size);
                for (int64_t unit = 0; unit < keys.count; ++unit)
                    add<two_rows>(w.at(row, unit * UNIT), {keys.v[unit] + column * VNNI<Bfloat16>, size * VNNI<Bfloat16>});
                store<two_rows>(to, size);
            });
    }

   private:
    struct Operand {
        const Bfloat16* first;
        int64_t stride;

        Operand at(int64_t row, int64_t column) const { return {first + row * stride + column, stride}; }
        const Bfloat16* second(int64_t distance) const { return first + distance; }
        int64_t stride_bytes() const { return stride * static_cast<int64_t>(sizeof(Bfloat16)); }
    };

    // Calls visit(std::bool_constant, row) for every two tiles of rows, or the one that is left.
    template <class Visit>
    static void each_pair(int64_t num_rows, Visit visit) {
        int64_t row = 0;
        for (; row + 2 * TILE_SIZE <= num_rows; row += 2 * TILE_SIZE) visit(std::true_type(), row);
        if (row < num_rows) visit(std::false_type(), row);
    }

    static void scale(int64_t num_rows, int64_t size, const float* decay, float* sums) {
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t i = 0; i < size; i += Avx512::W) {
                float* to = sums + row * size + i;
                Avx512::store(to, Avx512::multiply(Avx512::load(to), Avx512::all(decay[row])));
            }
    }

    // Sums of one tile of rows or two, by two tiles of columns.

    template <bool TWO_ROWS>
    static void zero() {
        _tile_zero(0);
        _tile_zero(1);
        if (TWO_ROWS) _tile_zero(2);
        if (TWO_ROWS) _tile_zero(3);
    }

    template <bool TWO_ROWS>
    static void load(const float* from, int64_t stride) {
        const int64_t bytes = stride * sizeof(float);
        _tile_loadd(0, from, bytes);
        _tile_loadd(1, from + TILE_SIZE, bytes);
        if (TWO_ROWS) _tile_loadd(2, from + TILE_SIZE * stride, bytes);
        if (TWO_ROWS) _tile_loadd(3, from + TILE_SIZE * stride + TILE_SIZE, bytes);
    }

    template <bool TWO_ROWS>
    static void store(float* to, int64_t stride) {
        const int64_t bytes = stride * sizeof(float);
        _tile_stored(0, to, bytes);
        _tile_stored(1, to + TILE_SIZE, bytes);
        if (TWO_ROWS) _tile_stored(2, to + TILE_SIZE * stride, bytes);
        if (TWO_ROWS) _tile_stored(3, to + TILE_SIZE * stride + TILE_SIZE, bytes);
    }

    template <bool TWO_ROWS>
    static void add(const Operand& rows, const Operand& columns) {
        _tile_loadd(6, columns.first, columns.stride_bytes());
        _tile_loadd(4, rows.first, rows.stride_bytes());
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, columns.second(TILE_SIZE * VNNI<Bfloat16>), columns.stride_bytes());
        _tile_dpbf16ps(1, 4, 7);
        if (TWO_ROWS) _tile_loadd(5, rows.second(TILE_SIZE * rows.stride), rows.stride_bytes());
        if (TWO_ROWS) _tile_dpbf16ps(2, 5, 6);
        if (TWO_ROWS) _tile_dpbf16ps(3, 5, 7);
    }
};

void attend_amx(const AttentionShape& shape, const AttentionPiece& piece) {
    TileProducts::take(shape, piece.num_rows) ? attend<TileProducts>(shape, piece) : attend<VectorProducts<Avx512, Bfloat16>>(shape, piece);
}

}  // namespace

AttentionKernel attention_amx(Dtype dtype) {
    if (dtype == Dtype::FLOAT32) return attention_over<Avx512>(dtype);
    return {attend_amx, join<Avx512, Bfloat16>};
}

}  // namespace loramux
