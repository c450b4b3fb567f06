#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "sampling.h"

namespace nb = nanobind;

using SamplingTuple = std::tuple<float, int64_t, double, float, double>;

static std::vector<loramux::SamplingRow> as_sampling(const std::vector<SamplingTuple>& tuples) {
    std::vector<loramux::SamplingRow> rows;
    for (const auto& [temperature, top_k, top_p, min_p, noise] : tuples) rows.push_back({temperature, top_k, top_p, min_p, noise});
    return rows;
}

void bind_sampling(nb::module_& m) {
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
