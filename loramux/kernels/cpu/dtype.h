#pragma once

#include <cstdint>

namespace loramux {

// What a model's weights, activations and caches are kept in. Sums are float32.
enum class Dtype { FLOAT32, BFLOAT16 };

inline int64_t itemsize(Dtype dtype) { return dtype == Dtype::FLOAT32 ? 4 : 2; }

// Values of the summed dimension that lie together in a packed operand (`vectors.h`).
inline int64_t vnni(Dtype dtype) { return 4 / itemsize(dtype); }

}  // namespace loramux
