// `vectors.h` for any machine, as the compiler maps it.
#pragma once

#include <cmath>

#include "vectors.h"

namespace loramux {

namespace {

struct Portable {
    static constexpr int W = 4;
    // Rows of a tile of products that registers hold beside one packed operand of 16 columns.
    static constexpr int TILE_ROWS = 4;
    // Column blocks of a packed weight (`matmul.h`) that so many rows go by.
    static constexpr int TILE_BLOCKS = 1;
    typedef float F __attribute__((vector_size(4 * W)));

    static F all(float value) {
        F result{};
        for (int i = 0; i < W; ++i) result[i] = value;
        return result;
    }

    static F load(const float* from) {
        F result{};
        std::memcpy(&result, from, sizeof result);
        return result;
    }

    static F load(const Bfloat16* from) {
        F result{};
        for (int i = 0; i < W; ++i) result[i] = bfloat16_to_float(from[i].bits);
        return result;
    }

    // The first count < W elements, zeros after them.
    template <class T>
    static F load(const T* from, int64_t count) {
        T padded[W] = {};
        std::memcpy(padded, from, count * sizeof(T));
        return load(padded);
    }

    static void store(float* to, F values) { std::memcpy(to, &values, sizeof values); }

    // Rounded to nearest even.
    static void store(Bfloat16* to, F values) {
        for (int i = 0; i < W; ++i) to[i].bits = float_to_bfloat16(values[i]);
    }

    template <class T>
    static void store(T* to, F values, int64_t count) {
        T padded[W];
        store(padded, values);
        std::memcpy(to, padded, count * sizeof(T));
    }

    static F add(F p, F q) { return p + q; }
    static F subtract(F p, F q) { return p - q; }
    static F multiply(F p, F q) { return p * q; }
    static F divide(F p, F q) { return p / q; }
    // p * q + sum
    static F multiply_add(F p, F q, F sum) { return p * q + sum; }

    // q where p is NaN.
    static F max(F p, F q) { return p > q ? p : q; }
    static F min(F p, F q) { return p < q ? p : q; }

    // 0 for NaN.
    static F or_zero(F values) { return values == values ? values : all(0); }

    static float total(F values) {
        float sum = 0;
        for (int i = 0; i < W; ++i) sum += values[i];
        return sum;
    }

    static float highest(F values) {
        float most = values[0];
        for (int i = 1; i < W; ++i) most = values[i] > most ? values[i] : most;
        return most;
    }

    static F exp(F values) {
        F result{};
        for (int i = 0; i < W; ++i) result[i] = std::exp(values[i]);
        return result;
    }

    template <class T>
    struct Packed {
        F part[VNNI<T>];
    };

    static Packed<float> load_packed(const float* from) { return {{load(from)}}; }

    static Packed<Bfloat16> load_packed(const Bfloat16* from) {
        Packed<Bfloat16> result{};
        for (int i = 0; i < 2 * W; ++i) result.part[i % 2][i / 2] = bfloat16_to_float(from[i].bits);
        return result;
    }

    // VNNI<T> rows of columns, `stride` elements apart.
    template <class T>
    static Packed<T> widen_packed(const int8_t* from, int64_t stride) {
        Packed<T> result{};
        for (int row = 0; row < VNNI<T>; ++row)
            for (int i = 0; i < W; ++i) result.part[row][i] = from[row * stride + i];
        return result;
    }

    // The same VNNI<T> values for every column.
    static Packed<float> all_packed(const float* from) { return {{all(*from)}}; }
    static Packed<Bfloat16> all_packed(const Bfloat16* from) {
        return {{all(bfloat16_to_float(from[0].bits)), all(bfloat16_to_float(from[1].bits))}};
    }

    // sum + the products of each column, in order.
    template <class T>
    static F dot(F sum, const Packed<T>& x, const Packed<T>& w) {
        for (int i = 0; i < VNNI<T>; ++i) sum = multiply_add(x.part[i], w.part[i], sum);
        return sum;
    }
};

}  // namespace

}  // namespace loramux
