#include <cmath>

#include "bfloat16.h"
#include "lora_tiles.h"

namespace loramux {

namespace {

// Plain arithmetic on four values, which the compiler maps to whatever the build's target has.
struct Scalar {
    typedef float Register __attribute__((vector_size(16)));
    using Factor = Register;
    static constexpr int WIDTH = 4, SHRINK_ROWS = 2, SHRINK_RANKS = 4;
    static constexpr int COLUMNS = 8, REGISTERS = 2, EXPAND_ROWS = 4;

    static Register all(float value) { return Register{value, value, value, value}; }

    static Register add(Register p, Register q) { return p + q; }

    static Register multiply_add(Register p, Register q, Register sum) { return p * q + sum; }

    static Register dot(Register sum, Factor x, Factor a) { return x * a + sum; }

    static float total(Register sum) { return (sum[0] + sum[2]) + (sum[1] + sum[3]); }

    static void load(const float* from, Register (&to)[REGISTERS]) { std::memcpy(to, from, sizeof to); }
};

struct ScalarFloat32 : Scalar {
    using Element = float;

    static Factor load_factor(const float* from) { return Register{from[0], from[1], from[2], from[3]}; }

    static void store(float* to, const Register (&from)[REGISTERS]) { std::memcpy(to, from, sizeof from); }
};

struct ScalarBfloat16 : Scalar {
    using Element = uint16_t;
    using Scalar::load;

    static Factor load_factor(const uint16_t* from) {
        return Register{bfloat16_to_float(from[0]), bfloat16_to_float(from[1]), bfloat16_to_float(from[2]), bfloat16_to_float(from[3])};
    }

    static void load(const uint16_t* from, Register (&to)[REGISTERS]) {
        for (int k = 0; k < REGISTERS; ++k) to[k] = load_factor(from + 4 * k);
    }

    static void store(uint16_t* to, const Register (&from)[REGISTERS]) {
        for (int i = 0; i < COLUMNS; ++i) to[i] = rounded(from[i / 4][i % 4]);
    }

   private:
    // To nearest even; NaN stays NaN.
    static uint16_t rounded(float value) {
        if (std::isnan(value)) return 0x7fc0;
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

}  // namespace

LoraKernel lora_scalar(LoraDtype dtype) { return kernel_for<ScalarFloat32, ScalarBfloat16>(dtype); }

}  // namespace loramux
