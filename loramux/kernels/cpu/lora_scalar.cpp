#include <cmath>

#include "bfloat16.h"
#include "lora_tiles.h"

namespace loramux {

namespace {

// Plain arrays, which a compiler turns into whatever vectors the build's target has.
struct Scalar {
    static constexpr int WIDTH = 8;
    static constexpr int SHRINK_ROWS = 2;
    static constexpr int SHRINK_RANKS = 2;
    static constexpr int EXPAND_ROWS = 4;

    struct Lanes {
        float of[WIDTH];
    };
    using Sum = Lanes;
    using Factor = Lanes;

    static Sum dot(const Sum& sum, const Factor& x, const Factor& a) { return multiply_add(x, a, sum); }

    static float total(const Sum& sum) {
        return ((sum.of[0] + sum.of[4]) + (sum.of[2] + sum.of[6])) + ((sum.of[1] + sum.of[5]) + (sum.of[3] + sum.of[7]));
    }

    static Lanes all(float value) { return {value, value, value, value, value, value, value, value}; }

    static Lanes add(const Lanes& p, const Lanes& q) {
        Lanes sums;
        for (int i = 0; i < WIDTH; ++i) sums.of[i] = p.of[i] + q.of[i];
        return sums;
    }

    static Lanes multiply_add(const Lanes& p, const Lanes& q, const Lanes& sum) {
        Lanes sums;
        for (int i = 0; i < WIDTH; ++i) sums.of[i] = p.of[i] * q.of[i] + sum.of[i];
        return sums;
    }

    static Lanes load(const float* from) {
        Lanes lanes;
        std::memcpy(lanes.of, from, sizeof lanes.of);
        return lanes;
    }
};

struct ScalarFloat32 : Scalar {
    using Element = float;

    static Factor load_factor(const float* from) { return load(from); }

    static void store(float* to, const Lanes& lanes) { std::memcpy(to, lanes.of, sizeof lanes.of); }
};

struct ScalarBfloat16 : Scalar {
    using Element = uint16_t;
    using Scalar::load;

    static Lanes load(const uint16_t* from) {
        Lanes lanes;
        for (int i = 0; i < WIDTH; ++i) lanes.of[i] = bfloat16_to_float(from[i]);
        return lanes;
    }

    static Factor load_factor(const uint16_t* from) { return load(from); }

    static void store(uint16_t* to, const Lanes& lanes) {
        for (int i = 0; i < WIDTH; ++i) to[i] = rounded(lanes.of[i]);
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
