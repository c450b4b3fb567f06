#include <type_traits>

#include "amx_tiles.h"
#include "matmul_tiles.h"
#include "scratch.h"
#include "vectors_avx512.h"

namespace loramux {

namespace {

// By so many rows int8 is multiplied as fast as it can be widened to memory, for tiles to load.
constexpr int64_t MAX_WIDENING_ROWS = 4;

// The operand of `ldtilecfg`.
struct alignas(64) TileConfig {
    explicit constexpr TileConfig(int num_rows) {
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = 64;
            rows[tile] = static_cast<uint8_t>(tile < 6 ? num_rows : TILE_SIZE);
        }
    }

    // The intrinsic does not tell the compiler what it reads.
    void load() const { asm volatile("ldtilecfg %0" : : "m"(*this)); }

    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Two tiles of rows, where there are two, by two column blocks.
template <bool TWO_ROWS, bool TWO_BLOCKS>
[[gnu::always_inline]] inline void multiply_tiles(const Bfloat16* x0, const Bfloat16* x1, int64_t x_bytes, const Bfloat16* weights,
                                                  int64_t block_size, int64_t num_inputs, float* sums0, float* sums1, int64_t sums_bytes) {
    _tile_zero(0);
    if (TWO_BLOCKS) _tile_zero(1);
    if (TWO_ROWS) _tile_zero(2);
    if (TWO_ROWS && TWO_BLOCKS) _tile_zero(3);
    for (int64_t input = 0; input < num_inputs; input += TILE_INPUTS) {
        const Bfloat16* columns = weights + input * BLOCK_COLUMNS;
        _tile_loadd(6, columns, 64);
        _tile_loadd(4, x0 + input, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_BLOCKS) _tile_loadd(7, columns + block_size, 64);
        if (TWO_BLOCKS) _tile_dpbf16ps(1, 4, 7);
        if (TWO_ROWS) _tile_loadd(5, x1 + input, x_bytes);
        if (TWO_ROWS) _tile_dpbf16ps(2, 5, 6);
        if (TWO_ROWS && TWO_BLOCKS) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums0, sums_bytes);
    if (TWO_BLOCKS) _tile_stored(1, sums0 + TILE_SIZE, sums_bytes);
    if (TWO_ROWS) _tile_stored(2, sums1, sums_bytes);
    if (TWO_ROWS && TWO_BLOCKS) _tile_stored(3, sums1 + TILE_SIZE, sums_bytes);
}

// Of one block or two: as they lie in the weight, or widened to memory that is good until the thread's next call.
const Bfloat16* columns_of(const PackedWeight& weight, int64_t block, int64_t num_blocks) {
    const int64_t block_size = padded_inputs(weight.in_features) * BLOCK_COLUMNS, size = num_blocks * block_size;
    if (!weight.scales) return static_cast<const Bfloat16*>(weight.blocks) + block * block_size;
    thread_local Scratch memory;
    const auto* steps = static_cast<const int8_t*>(weight.blocks) + block * block_size;
    auto* columns = static_cast<Bfloat16*>(memory.reserve(size * sizeof(Bfloat16)));
    constexpr int64_t PAIRS = VNNI<Bfloat16> * BLOCK_COLUMNS;
    for (int64_t i = 0; i < size; i += PAIRS) {
        const auto pairs = Avx512::widen_packed<Bfloat16>(steps + i, BLOCK_COLUMNS);
        std::memcpy(columns + i, &pairs, sizeof pairs);
    }
    return columns;
}

// All rows of one block or two. Where the last tile of rows would not be whole it begins before its place and makes some rows again.
template <class Y, bool TWO_BLOCKS>
void multiply_panel(const Matmul& of, int64_t block) {
    constexpr int COLUMNS = (TWO_BLOCKS ? 2 : 1) * TILE_SIZE;
    const int64_t num_inputs = padded_inputs(of.weight.in_features), block_size = num_inputs * BLOCK_COLUMNS;
    const Bfloat16* weights = columns_of(of.weight, block, TWO_BLOCKS ? 2 : 1);
    const auto* x = static_cast<const Bfloat16*>(of.x);
    const int64_t x_bytes = of.x_stride * sizeof(Bfloat16), last = std::max<int64_t>(0, of.num_rows - TILE_SIZE);
    const int64_t num_rows = std::min(TILE_SIZE, of.num_rows);
    const Finish<Avx512, Y, COLUMNS> finish(of, static_cast<const Bfloat16*>(of.bias), block * BLOCK_COLUMNS);
    Sums<2 * TILE_SIZE, COLUMNS> sums;
    float* sums1 = sums.values + TILE_SIZE * COLUMNS;
    for (int64_t row = 0; row < of.num_rows; row += 2 * TILE_SIZE) {
        const int64_t first = std::min(row, last), second = std::min(row + TILE_SIZE, last);
        const bool two_rows = first < second;
        const auto tiles = two_rows ? multiply_tiles<true, TWO_BLOCKS> : multiply_tiles<false, TWO_BLOCKS>;
        tiles(x + first * of.x_stride, x + second * of.x_stride, x_bytes, weights, block_size, num_inputs, sums.values, sums1, COLUMNS * 4);
        finish(first, num_rows, sums.values);
        if (two_rows) finish(second, num_rows, sums1);
    }
}

template <class Y>
void multiply_amx(const Matmul& of, int64_t first_block, int64_t end_block) {
    if (of.weight.scales && of.num_rows <= MAX_WIDENING_ROWS)
        return matmul_avx512_bf16(Dtype::BFLOAT16, std::is_same_v<Y, float>)(of, first_block, end_block);
    const bool few_rows = of.num_rows < TILE_SIZE;
    if (few_rows) TileConfig(static_cast<int>(of.num_rows)).load();
    int64_t block = first_block;
    for (; block + 2 <= end_block; block += 2) multiply_panel<Y, true>(of, block);
    if (block < end_block) multiply_panel<Y, false>(of, block);
    if (few_rows) begin_tiles_amx();
}

}  // namespace

void begin_tiles_amx() {
    static constexpr TileConfig whole(TILE_SIZE);
    whole.load();
}

void end_tiles_amx() { _tile_release(); }

MatmulKernel matmul_amx(Dtype dtype, bool y_is_float32) {
    if (dtype == Dtype::FLOAT32) return matmul_avx512(dtype, y_is_float32);
    return y_is_float32 ? multiply_amx<float> : multiply_amx<Bfloat16>;
}

}  // namespace loramux
