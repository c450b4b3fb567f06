#include "matmul.h"

#include <cstring>
#include <stdexcept>

#include "matmul_kernels.h"
#include "team.h"

namespace loramux {

namespace {

// Of one thread's turn at a product.
constexpr int64_t TURN_BLOCKS = 4;

// Whole pairs (or single values) of the inputs, as they lie in a packed weight: an element for each column, then the next.
template <class Bits>
struct Groups {
    Bits* first;
    int64_t block_size;

    Groups(const void* blocks, int64_t in_features)
        : first(static_cast<Bits*>(const_cast<void*>(blocks))), block_size(padded_inputs(in_features) * BLOCK_COLUMNS) {}

    static constexpr int64_t VNNI = 4 / sizeof(Bits);

    Bits& at(int64_t row, int64_t input) const {
        Bits* block = first + row / BLOCK_COLUMNS * block_size;
        return block[(input / VNNI * BLOCK_COLUMNS + row % BLOCK_COLUMNS) * VNNI + input % VNNI];
    }
};

template <class Bits>
void pack(const Bits* weight, int64_t out_features, int64_t in_features, void* packed) {
    const Groups<Bits> groups(packed, in_features);
    for (int64_t row = 0; row < out_features; ++row)
        for (int64_t input = 0; input < in_features; ++input) groups.at(row, input) = weight[row * in_features + input];
}

template <class Bits>
void unpack(const PackedWeight& weight, int64_t row, Bits* to) {
    const Groups<Bits> groups(weight.blocks, weight.in_features);
    for (int64_t input = 0; input < weight.in_features; ++input) to[input] = groups.at(row, input);
}

}  // namespace

int64_t packed_weight_bytes(int64_t out_features, int64_t in_features, Dtype dtype) {
    return num_column_blocks(out_features) * BLOCK_COLUMNS * padded_inputs(in_features) * itemsize(dtype);
}

void pack_weight(const void* weight, int64_t out_features, int64_t in_features, Dtype dtype, void* packed) {
    std::memset(packed, 0, packed_weight_bytes(out_features, in_features, dtype));
    if (dtype == Dtype::FLOAT32)
        pack(static_cast<const uint32_t*>(weight), out_features, in_features, packed);
    else
        pack(static_cast<const uint16_t*>(weight), out_features, in_features, packed);
}

void unpack_row(const PackedWeight& weight, int64_t row, void* to) {
    if (weight.dtype == Dtype::FLOAT32)
        unpack(weight, row, static_cast<uint32_t*>(to));
    else
        unpack(weight, row, static_cast<uint16_t*>(to));
}

MatmulKernel matmul_kernel(Isa isa, Dtype dtype, bool y_is_float32) {
    if (!is_supported(isa)) throw std::invalid_argument("this machine does not run the instruction set asked for");
#ifdef LORAMUX_X86
    if (isa == Isa::AMX) return matmul_amx(dtype, y_is_float32);
    if (isa == Isa::AVX512_BF16) return matmul_avx512_bf16(dtype, y_is_float32);
    if (isa == Isa::AVX512) return matmul_avx512(dtype, y_is_float32);
    if (isa == Isa::AVX2) return matmul_avx2(dtype, y_is_float32);
#endif
    return matmul_portable(dtype, y_is_float32);
}

#ifdef LORAMUX_X86
void begin_tiles(Isa isa) {
    if (isa == Isa::AMX) begin_tiles_amx();
}

void end_tiles(Isa isa) {
    if (isa == Isa::AMX) end_tiles_amx();
}
#else
void begin_tiles(Isa) {}
void end_tiles(Isa) {}
#endif

void matmul(const Matmul& of, Isa isa, bool y_is_float32, int num_threads) {
    const MatmulKernel kernel = matmul_kernel(isa, of.weight.dtype, y_is_float32);
    Team::run(num_threads, [&](Member& member) {
        begin_tiles(isa);
        member.share(num_column_blocks(of.weight.out_features), TURN_BLOCKS,
                     [&](int64_t begin, int64_t end) { kernel(of, begin, end); });
        end_tiles(isa);
    });
}

}  // namespace loramux
