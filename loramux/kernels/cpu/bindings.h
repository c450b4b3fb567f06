// Python bindings. Tensors arrive as raw addresses and sizes, checked by the Python modules beside: that keeps torch's headers out of the
// build and a call at a few microseconds.
#pragma once

#include <nanobind/nanobind.h>

template <typename T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void bind_decoder(nanobind::module_& m);
void bind_lora(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
