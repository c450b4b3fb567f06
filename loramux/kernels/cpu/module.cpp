// Python bindings. Tensors arrive as raw addresses and sizes, checked by `ops.py`: that keeps torch's headers out of the build and a
// call at a few microseconds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "apply_bitmask.h"
#include "isa.h"

namespace nb = nanobind;
using namespace nb::literals;

template <typename T>
static T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

NB_MODULE(_native, m) {
    nb::enum_<loramux::Isa>(m, "Isa")
        .value("SCALAR", loramux::Isa::SCALAR)
        .value("AVX2", loramux::Isa::AVX2)
        .value("AVX512", loramux::Isa::AVX512);

    m.def("supported_isas", [] { return loramux::supported_isas(); });

    m.def(
        "apply_bitmask",
        [](uintptr_t logits, int64_t num_rows, int64_t vocab_size, uintptr_t bitmask, uintptr_t rows, int64_t num_masks, loramux::Isa isa) {
            loramux::apply_bitmask(pointer<float>(logits), num_rows, vocab_size, pointer<const int32_t>(bitmask),
                                   pointer<const int64_t>(rows), num_masks, isa);
        },
        "logits"_a, "num_rows"_a, "vocab_size"_a, "bitmask"_a, "rows"_a, "num_masks"_a, "isa"_a,
        nb::call_guard<nb::gil_scoped_release>());
}
