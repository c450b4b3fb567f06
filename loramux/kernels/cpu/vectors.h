// What the `vectors_*.h` have in common: each defines a class V of W lanes of float32, with the members of `vectors_portable.h`.
//
// Elements T are float or Bfloat16 and always computed on as float32. A packed operand, `V::Packed<T>`, is W columns by VNNI<T>
// neighbouring values of the summed dimension (pairs for Bfloat16, as machines take them), read from VNNI<T> * W contiguous elements:
// columns outside, pairs inside. V has internal linkage: code compiled for one instruction set must not be the linker's choice for another.
#pragma once

#include "bfloat16.h"

namespace loramux {

template <class T>
constexpr int VNNI = sizeof(float) / sizeof(T);

// Of `__builtin_prefetch`.
constexpr int TO_SECOND_LEVEL = 2;

}  // namespace loramux
