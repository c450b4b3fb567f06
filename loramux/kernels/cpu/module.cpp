// Python bindings. Tensors arrive as raw addresses and sizes, checked by `ops.py` and
// `lora.py`: that keeps torch's headers out of the build and a
// call at a few microseconds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "apply_bitmask.h"
#include "isa.h"
#include "lora.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

template <typename T>
static T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

using SegmentTuple = std::tuple<int64_t, int64_t, const loramux::LoraAdapter*>;

static std::vector<loramux::LoraSegment> as_segments(const std::vector<SegmentTuple>& tuples) {
    std::vector<loramux::LoraSegment> segments;
    for (const auto& [start, end, adapter] : tuples) segments.push_back({start, end, adapter});
    return segments;
}

static void bind_lora_weights(nb::module_& m) {
    using namespace loramux;

    nb::class_<LoraSlice>(m, "LoraSlice")
        .def(
            "__init__",
            [](LoraSlice* self, int64_t rank_start, int64_t rank_end, int64_t out_start, int64_t out_end, uintptr_t b, uintptr_t gain,
               uintptr_t shift) {
                new (self) LoraSlice{rank_start, rank_end, out_start, out_end,
                                     pointer<void>(b), pointer<float>(gain), pointer<float>(shift)};
            },
            nb::kw_only(), "rank_start"_a, "rank_end"_a, "out_start"_a, "out_end"_a, "b"_a, "gain"_a, "shift"_a);

    nb::class_<LoraSite>(m, "LoraSite")
        .def(
            "__init__",
            [](LoraSite* self, uintptr_t a, int64_t num_ranks, int64_t in_features, int64_t out_features, std::vector<LoraSlice> slices) {
                new (self) LoraSite{pointer<void>(a), num_ranks, in_features, out_features, std::move(slices)};
            },
            nb::kw_only(), "a"_a, "num_ranks"_a, "in_features"_a, "out_features"_a, "slices"_a);

    nb::class_<LoraEmbedding>(m, "LoraEmbedding")
        .def(
            "__init__",
            [](LoraEmbedding* self, uintptr_t a, int64_t vocab_size, const LoraSlice& slice) {
                new (self) LoraEmbedding{pointer<void>(a), vocab_size, slice};
            },
            nb::kw_only(), "a"_a, "vocab_size"_a, "slice"_a);

    nb::class_<LoraAdapter>(m, "LoraAdapter")
        .def(nb::init<std::vector<std::optional<LoraSite>>, std::optional<LoraEmbedding>>(), "sites"_a, "embedding"_a.none());
}

static void bind_lora_plan(nb::module_& m) {
    using namespace loramux;

    nb::class_<LoraPlan>(m, "LoraPlan")
        .def(
            "__init__",
            [](LoraPlan* self, const std::vector<SegmentTuple>& segments, Dtype dtype, Isa isa) {
                new (self) LoraPlan(as_segments(segments), dtype, isa);
            },
            "segments"_a, "dtype"_a, "isa"_a)
        .def(
            "apply",
            [](LoraPlan& plan, size_t site, uintptr_t y, int64_t y_rows, int64_t y_columns, uintptr_t x, int64_t x_rows, int64_t x_columns,
               int num_threads) {
                plan.apply(site, {pointer<void>(y), y_rows, y_columns, y_columns}, {pointer<void>(x), x_rows, x_columns, x_columns},
                           num_threads);
            },
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "embed",
            [](LoraPlan& plan, uintptr_t y, int64_t y_rows, int64_t y_columns, uintptr_t token_ids, int64_t num_tokens, int num_threads) {
                plan.embed({pointer<void>(y), y_rows, y_columns, y_columns}, pointer<int64_t>(token_ids), num_tokens, num_threads);
            },
            nb::call_guard<nb::gil_scoped_release>());
}

using SamplingTuple = std::tuple<float, int64_t, double, float, double>;

static std::vector<loramux::SamplingRow> as_sampling(const std::vector<SamplingTuple>& tuples) {
    std::vector<loramux::SamplingRow> rows;
    for (const auto& [temperature, top_k, top_p, min_p, noise] : tuples) rows.push_back({temperature, top_k, top_p, min_p, noise});
    return rows;
}

static void bind_sampling(nb::module_& m) {
    using namespace loramux;

    m.def(
        "row_peaks",
        [](uintptr_t logits, int64_t num_rows, int64_t vocab_size, uintptr_t peaks, Isa isa, int num_threads) {
            row_peaks({pointer<float>(logits), num_rows, vocab_size}, pointer<float>(peaks), isa, num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());

    m.def("choose_tokens", [](uintptr_t logits, int64_t num_rows, int64_t vocab_size, const std::vector<SamplingTuple>& sampling, Isa isa,
                              int num_threads) {
        const auto rows = as_sampling(sampling);
        nb::gil_scoped_release released;
        return choose_tokens({pointer<float>(logits), num_rows, vocab_size}, rows, isa, num_threads);
    });

    m.def(
        "token_logprobs",
        [](uintptr_t logits, int64_t num_rows, int64_t vocab_size, uintptr_t token_ids, uintptr_t values, uintptr_t ranks, int64_t k,
           uintptr_t top_ids, uintptr_t top_values, Isa isa, int num_threads) {
            token_logprobs({pointer<float>(logits), num_rows, vocab_size}, pointer<int64_t>(token_ids),
                           {pointer<float>(values), pointer<int64_t>(ranks), k, pointer<int64_t>(top_ids), pointer<float>(top_values)}, isa,
                           num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>());
}

NB_MODULE(_native, m) {
    nb::enum_<loramux::Dtype>(m, "Dtype").value("FLOAT32", loramux::Dtype::FLOAT32).value("BFLOAT16", loramux::Dtype::BFLOAT16);

    nb::enum_<loramux::Isa>(m, "Isa")
        .value("SCALAR", loramux::Isa::SCALAR)
        .value("AVX2", loramux::Isa::AVX2)
        .value("AVX512", loramux::Isa::AVX512)
        .value("AVX512_BF16", loramux::Isa::AVX512_BF16)
        .value("AMX", loramux::Isa::AMX);

    m.def("supported_isas", [] { return loramux::supported_isas(); });

    m.def(
        "apply_bitmask",
        [](uintptr_t logits, int64_t num_rows, int64_t vocab_size, uintptr_t bitmask, uintptr_t rows, int64_t num_masks, loramux::Isa isa) {
            loramux::apply_bitmask(pointer<float>(logits), num_rows, vocab_size, pointer<const int32_t>(bitmask),
                                   pointer<const int64_t>(rows), num_masks, isa);
        },
        "logits"_a, "num_rows"_a, "vocab_size"_a, "bitmask"_a, "rows"_a, "num_masks"_a, "isa"_a,
        nb::call_guard<nb::gil_scoped_release>());

    bind_lora_weights(m);
    bind_lora_plan(m);
    bind_sampling(m);
}
