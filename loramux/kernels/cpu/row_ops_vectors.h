// The kernels of `row_ops.h` over a vector class V (`vectors.h`) and elements T, included once by the file of each instruction set.
#pragma once

#include <cmath>

#include "row_ops.h"
#include "vectors.h"

namespace loramux {

namespace {

// Calls visit(i, load, store) for every vector of a row, the last one perhaps in part.
template <class V, class Visit>
[[gnu::always_inline]] inline void each_vector(int64_t size, Visit visit) {
    const int64_t whole = size / V::W * V::W;
    for (int64_t i = 0; i < whole; i += V::W)
        visit(
            i, [](auto* from) { return V::load(from); }, [](auto* to, typename V::F values) { V::store(to, values); });
    if (const int64_t count = size - whole)
        visit(
            whole, [count](auto* from) { return V::load(from, count); },
            [count](auto* to, typename V::F values) { V::store(to, values, count); });
}

template <class V, class T>
void rms_norm(const void* from, const void* by, float eps, int64_t size, void* to) {
    const auto *x = static_cast<const T*>(from), *weight = static_cast<const T*>(by);
    auto* y = static_cast<T*>(to);
    typename V::F squares = V::all(0);
    each_vector<V>(size, [&](int64_t i, auto load, auto) {
        const auto values = load(x + i);
        squares = V::multiply_add(values, values, squares);
    });
    const auto factor = V::all(1 / std::sqrt(V::total(squares) / static_cast<float>(size) + eps));
    each_vector<V>(size, [&](int64_t i, auto load, auto store) {
        store(y + i, V::multiply(V::multiply(load(x + i), factor), load(weight + i)));
    });
}

template <class V, class T>
void add(void* to, const void* from, int64_t size) {
    auto* x = static_cast<T*>(to);
    const auto* y = static_cast<const T*>(from);
    each_vector<V>(size, [&](int64_t i, auto load, auto store) { store(x + i, V::add(load(x + i), load(y + i))); });
}

template <class V, class T>
void silu_mul(const void* gates, const void* ups, int64_t size, void* to) {
    const auto *gate = static_cast<const T*>(gates), *up = static_cast<const T*>(ups);
    auto* y = static_cast<T*>(to);
    each_vector<V>(size, [&](int64_t i, auto load, auto store) {
        const auto x = load(gate + i);
        const auto sigmoid = V::divide(V::all(1), V::add(V::all(1), V::exp(V::subtract(V::all(0), x))));
        store(y + i, V::multiply(V::multiply(x, sigmoid), load(up + i)));
    });
}

template <class V, class T>
void rotate(void* row, const float* cos, const float* sin, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    auto *first = static_cast<T*>(row), *second = first + half;
    each_vector<V>(half, [&](int64_t i, auto load, auto store) {
        const auto a = load(first + i), b = load(second + i);
        store(first + i, V::subtract(V::multiply(a, load(cos + i)), V::multiply(b, load(sin + i))));
        store(second + i, V::multiply_add(b, load(cos + half + i), V::multiply(a, load(sin + half + i))));
    });
}

template <class V, class T>
constexpr RowOps ROW_OPS = {rms_norm<V, T>, add<V, T>, silu_mul<V, T>, rotate<V, T>};

template <class V>
RowOps row_ops_over(Dtype dtype) {
    return dtype == Dtype::FLOAT32 ? ROW_OPS<V, float> : ROW_OPS<V, Bfloat16>;
}

}  // namespace

}  // namespace loramux
