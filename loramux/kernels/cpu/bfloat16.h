#pragma once

#include <cstdint>
#include <cstring>

namespace loramux {

// Internal linkage, as it is compiled for several instruction sets.
static inline float bfloat16_to_float(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

}  // namespace loramux
