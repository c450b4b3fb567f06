#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "decoder.h"

namespace nb = nanobind;
using namespace nb::literals;

static void bind_matmul(nb::module_& m) {
    using namespace loramux;

    nb::class_<PackedWeight>(m, "PackedWeight")
        .def(
            "__init__",
            [](PackedWeight* self, uintptr_t blocks, int64_t out_features, int64_t in_features, Dtype dtype, uintptr_t scales) {
                new (self) PackedWeight{pointer<void>(blocks), out_features, in_features, dtype, pointer<float>(scales)};
            },
            nb::kw_only(), "blocks"_a, "out_features"_a, "in_features"_a, "dtype"_a, "scales"_a);

    m.attr("INPUT_ALIGN") = INPUT_ALIGN;
    m.def("packed_weight_bytes", &packed_weight_bytes);
    m.def(
        "pack_weight",
        [](uintptr_t weight, int64_t out_features, int64_t in_features, Dtype dtype, bool is_int8, uintptr_t packed) {
            pack_weight(pointer<void>(weight), out_features, in_features, dtype, is_int8, pointer<void>(packed));
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "unpack_weight",
        [](const PackedWeight& packed, uintptr_t weight) {
            const int64_t row_bytes = packed.in_features * itemsize(packed.dtype);
            for (int64_t row = 0; row < packed.out_features; ++row) unpack_row(packed, row, pointer<char>(weight) + row * row_bytes);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "matmul",
        [](uintptr_t x, int64_t x_stride, int64_t num_rows, const PackedWeight& weight, uintptr_t bias, uintptr_t y, int64_t y_stride,
           bool y_is_float32, Isa isa, int num_threads) {
            matmul({pointer<void>(x), x_stride, num_rows, weight, pointer<void>(bias), pointer<void>(y), y_stride}, isa, y_is_float32,
                   num_threads);
        },
        nb::kw_only(), "x"_a, "x_stride"_a, "num_rows"_a, "weight"_a, "bias"_a, "y"_a, "y_stride"_a, "y_is_float32"_a, "isa"_a,
        "num_threads"_a, nb::call_guard<nb::gil_scoped_release>());
}

static void bind_decoder_weights(nb::module_& m) {
    using namespace loramux;

    nb::class_<AttentionShape>(m, "AttentionShape")
        .def(
            "__init__",
            [](AttentionShape* self, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t window, float scale, Dtype dtype) {
                new (self) AttentionShape{num_heads, num_kv_heads, head_dim, 0, window, scale, dtype};
            },
            nb::kw_only(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "window"_a, "scale"_a, "dtype"_a);

    nb::class_<Linear>(m, "Linear")
        .def(
            "__init__",
            [](Linear* self, const PackedWeight& weight, uintptr_t bias) { new (self) Linear{weight, pointer<void>(bias)}; }, "weight"_a,
            "bias"_a);

    nb::class_<DecoderLayer>(m, "DecoderLayer")
        .def(
            "__init__",
            [](DecoderLayer* self, uintptr_t input_norm, const Linear& qkv, uintptr_t q_norm, uintptr_t k_norm, const Linear& o,
               uintptr_t post_attention_norm, const Linear& gate_up, const Linear& down) {
                new (self) DecoderLayer{pointer<void>(input_norm),          qkv,     pointer<void>(q_norm), pointer<void>(k_norm), o,
                                        pointer<void>(post_attention_norm), gate_up, down};
            },
            nb::kw_only(), "input_norm"_a, "qkv"_a, "q_norm"_a, "k_norm"_a, "o"_a, "post_attention_norm"_a, "gate_up"_a, "down"_a);

    nb::class_<KvCaches>(m, "KvCaches")
        .def(
            "__init__",
            [](KvCaches* self, const std::vector<std::pair<uintptr_t, uintptr_t>>& layers, int64_t block_size) {
                new (self) KvCaches{{}, block_size};
                for (const auto& [k, v] : layers) self->layers.push_back({pointer<void>(k), pointer<void>(v)});
            },
            "layers"_a, "block_size"_a);
}

void bind_decoder(nb::module_& m) {
    using namespace loramux;

    bind_matmul(m);
    bind_decoder_weights(m);

    nb::class_<TeamSize>(m, "TeamSize")
        .def(nb::init<int>(), "most"_a)
        .def("choose", &TeamSize::choose, "now"_a)
        .def("observe", &TeamSize::observe, "now"_a, "seconds"_a, "cpu_seconds"_a);

    nb::class_<Decoder>(m, "Decoder")
        .def(
            "__init__",
            [](Decoder* self, const AttentionShape& attention, const PackedWeight& embedding, std::vector<DecoderLayer> layers,
               uintptr_t norm, const Linear& head, float rms_norm_eps, Isa isa, int num_threads) {
                new (self) Decoder(attention, {embedding, std::move(layers), pointer<void>(norm), head, rms_norm_eps}, isa, num_threads);
            },
            "attention"_a, nb::kw_only(), "embedding"_a, "layers"_a, "norm"_a, "head"_a, "rms_norm_eps"_a, "isa"_a, "num_threads"_a)
        .def(
            "forward",
            [](Decoder& decoder, int64_t num_tokens, uintptr_t token_ids, uintptr_t cos, uintptr_t sin, std::vector<int64_t> query_starts,
               std::vector<int64_t> context_lens, uintptr_t block_tables, int64_t table_stride, uintptr_t kv_slots, uintptr_t logit_rows,
               int64_t num_logit_rows, uintptr_t logits, LoraPlan* lora, LoraPlan* logit_lora, const KvCaches& caches) {
                const DecoderBatch batch{num_tokens,
                                         pointer<int64_t>(token_ids),
                                         pointer<float>(cos),
                                         pointer<float>(sin),
                                         {std::move(query_starts), std::move(context_lens), pointer<int64_t>(block_tables), table_stride},
                                         pointer<int64_t>(kv_slots),
                                         pointer<int64_t>(logit_rows),
                                         num_logit_rows,
                                         pointer<float>(logits),
                                         lora,
                                         logit_lora};
                decoder.forward(batch, caches);
            },
            nb::kw_only(), "num_tokens"_a, "token_ids"_a, "cos"_a, "sin"_a, "query_starts"_a, "context_lens"_a, "block_tables"_a,
            "table_stride"_a, "kv_slots"_a, "logit_rows"_a, "num_logit_rows"_a, "logits"_a, "lora"_a.none(), "logit_lora"_a.none(),
            "caches"_a, nb::call_guard<nb::gil_scoped_release>());
}
