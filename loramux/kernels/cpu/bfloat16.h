#pragma once

#include <cstdint>
#include <cstring>

namespace loramux {

// The upper half of a float32.
struct Bfloat16 {
    uint16_t bits;
};

// Internal linkage, as these are compiled for several instruction sets.
static inline float bfloat16_to_float(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// To nearest even; NaN stays NaN.
static inline uint16_t float_to_bfloat16(float value) {
    if (value != value) return 0x7fc0;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace loramux
