#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "apply_bitmask.h"
#include "bindings.h"
#include "dtype.h"
#include "isa.h"

namespace nb = nanobind;
using namespace nb::literals;

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

    bind_lora(m);
    bind_decoder(m);
    bind_sampling(m);
}
