#include "matmul.h"

#include <cstring>
#include <stdexcept>

#include "bfloat16.h"
#include "matmul_kernels.h"
#include "team.h"

namespace loramux {

namespace {

// Of one thread's turn at a product.
constexpr int64_t TURN_BLOCKS = 4;

// The elements of a packed weight, of which `vnni` neighbours lie together for each column.
template <class Element>
struct Groups {
    Element* first;
    int64_t block_size;
    int64_t vnni;

    Groups(const void* blocks, int64_t in_features, Dtype dtype)
        : first(static_cast<Element*>(const_cast<void*>(blocks))), block_size(padded_inputs(in_features) * BLOCK_COLUMNS),
          vnni(sizeof(Element) == sizeof(int8_t) ? 1 : loramux::vnni(dtype)) {}

    Element& at(int64_t row, int64_t input) const {
        Element* block = first + row / BLOCK_COLUMNS * block_size;
        return block[(input / vnni * BLOCK_COLUMNS + row % BLOCK_COLUMNS) * vnni + input % vnni];
    }
};

template <class Element>
void pack(const void* from, int64_t out_features, int64_t in_features, Dtype dtype, void* packed) {
    const Groups<Element> groups(packed, in_features, dtype);
    const auto* weight = static_cast<const Element*>(from);
    for (int64_t row = 0; row < out_features; ++row)
        for (int64_t input = 0; input < in_features; ++input) groups.at(row, input) = weight[row * in_features + input];
}

// Calls use(input, element) for every input of a row.
template <class Element, class Use>
void each_of_row(const PackedWeight& weight, int64_t row, Use use) {
    const Groups<Element> groups(weight.blocks, weight.in_features, weight.dtype);
    for (int64_t input = 0; input < weight.in_features; ++input) use(input, groups.at(row, input));
}

}  // namespace

int64_t packed_weight_bytes(int64_t out_features, int64_t in_features, Dtype dtype, bool is_int8) {
    return num_column_blocks(out_features) * BLOCK_COLUMNS * padded_inputs(in_features) * (is_int8 ? 1 : itemsize(dtype));
}

void pack_weight(const void* weight, int64_t out_features, int64_t in_features, Dtype dtype, bool is_int8, void* packed) {
    std::memset(packed, 0, packed_weight_bytes(out_features, in_features, dtype, is_int8));
    const auto of_element = is_int8 ? pack<int8_t> : dtype == Dtype::FLOAT32 ? pack<float> : pack<Bfloat16>;
    of_element(weight, out_features, in_features, dtype, packed);
}

void unpack_row(const PackedWeight& weight, int64_t row, void* to) {
    auto* wide = static_cast<float*>(to);
    auto* narrow = static_cast<Bfloat16*>(to);
    const bool is_float32 = weight.dtype == Dtype::FLOAT32;
    if (weight.scales)
        each_of_row<int8_t>(weight, row, [&](int64_t input, int8_t step) {
            const float value = static_cast<float>(step) * weight.scales[row];
            is_float32 ? void(wide[input] = value) : void(narrow[input].bits = float_to_bfloat16(value));
        });
    else if (is_float32)
        each_of_row<float>(weight, row, [&](int64_t input, float value) { wide[input] = value; });
    else
        each_of_row<Bfloat16>(weight, row, [&](int64_t input, Bfloat16 value) { narrow[input] = value; });
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
