#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "lora.h"

namespace nb = nanobind;
using namespace nb::literals;

using SegmentTuple = std::tuple<int64_t, int64_t, const loramux::LoraAdapter*>;

static std::vector<loramux::LoraSegment> as_segments(const std::vector<SegmentTuple>& tuples) {
    std::vector<loramux::LoraSegment> segments;
    for (const auto& [start, end, adapter] : tuples) segments.push_back({start, end, adapter});
    return segments;
}

static void bind_weights(nb::module_& m) {
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

static void bind_plan(nb::module_& m) {
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

void bind_lora(nb::module_& m) {
    bind_weights(m);
    bind_plan(m);
}
