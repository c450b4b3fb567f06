// `sampling_kernel.h` as plain loops, which the compiler maps to the instruction set that it compiles for. Included once by the file of
// each; everything has internal linkage, so that code for one is never the linker's choice for another. The compiler may not contract
// products and sums (-ffp-contract=off), and needs leave to compare in vectors (-fno-trapping-math).
#pragma once

#include <cstring>

#include "sampling_kernel.h"

namespace loramux {

namespace {

constexpr int32_t INFINITE = 0x7f800000;
constexpr int32_t MAGNITUDE = 0x7fffffff;
constexpr int32_t LEAST = -MAGNITUDE - 1;

int32_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Integers in the order of the numbers, -0 below 0; its own inverse.
int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & MAGNITUDE); }

struct Extremes {
    int32_t most = LEAST;
    int32_t magnitude = 0;
};

void widen(Extremes& extremes, const float* logits, int64_t size) {
    int32_t most = LEAST, magnitude = 0;
    for (int64_t i = 0; i < size; ++i) {
        const int32_t bits = bits_of(logits[i]);
        const int32_t key = ordered(bits), size_of = bits & MAGNITUDE;
        most = key > most ? key : most;
        magnitude = size_of > magnitude ? size_of : magnitude;
    }
    extremes.most = most;
    extremes.magnitude = magnitude > extremes.magnitude ? magnitude : extremes.magnitude;
}

float peak(const float* logits, int64_t size, float* maxima) {
    Extremes block;
    int32_t most = LEAST;
    for (int64_t begin = 0; begin < size; begin += SAMPLING_BLOCK) {
        if (begin + SAMPLING_BLOCK <= size)
            widen(block, logits + begin, SAMPLING_BLOCK);
        else
            widen(block, logits + begin, size - begin);
        if (maxima) maxima[begin / SAMPLING_BLOCK] = float_of(ordered(block.most));
        most = block.most > most ? block.most : most;
    }
    return float_of(block.magnitude > INFINITE ? MAGNITUDE : ordered(most));
}

// The powers of e that are 2^-41 and more; those below weigh nothing.
constexpr float LOWEST = -29.0f;
// Added to a small number and taken away again it leaves the nearest whole one, even of two.
constexpr float TO_WHOLE = 12582912.0f;

// e^x for LOWEST <= x <= 0: 2^n e^r with x = n ln 2 + r and a polynomial of degree 6 in r (Cephes' expf: within 2 ulp).
float power(float x) {
    const float n = (x * 1.44269504088896341f + TO_WHOLE) - TO_WHOLE;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r;
    return (p + 1.0f) * float_of((static_cast<int32_t>(n) + 127) << 23);
}

// The nearest whole number to 2^40 p, even of two, for 0 <= p <= 1.
int64_t weight(float p) {
    constexpr double MANTISSA = 4503599627370496.0;
    const double raised = static_cast<double>(p) * 1099511627776.0 + MANTISSA;
    int64_t bits;
    std::memcpy(&bits, &raised, sizeof bits);
    return bits & ((int64_t{1} << 52) - 1);
}

int64_t weight_of(float logit, const Weighing& weighing) {
    const float x = (logit - weighing.peak) * weighing.coldness;
    const float within = x < LOWEST ? LOWEST : x;
    const float p = power(within);
    return x < LOWEST || p < weighing.min_p ? 0 : weight(p);
}

void weigh(const float* logits, int64_t size, const Weighing& weighing, int64_t* weights) {
    const Weighing local = weighing;
    for (int64_t i = 0; i < size; ++i) weights[i] = weight_of(logits[i], local);
}

int64_t weight_sum(const float* logits, int64_t size, const Weighing& weighing) {
    int64_t sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += weight_of(logits[i], weighing);
    return sum;
}

void sum_spans(const float* logits, int64_t size, const Weighing& weighing, int64_t* sums) {
    const Weighing local = weighing;
    for (int64_t begin = 0; begin < size; begin += SAMPLING_SPAN)
        sums[begin / SAMPLING_SPAN] = weight_sum(logits + begin, begin + SAMPLING_SPAN <= size ? SAMPLING_SPAN : size - begin, local);
}

[[maybe_unused]] bool any_at_least(const float* logits, int64_t size, float least) {
    int32_t found = 0;
    for (int64_t i = 0; i < size; ++i) found |= logits[i] >= least;
    return found;
}

[[maybe_unused]] int64_t collect(const float* logits, int64_t size, float least, int32_t* ids, float* kept) {
    constexpr int64_t FEW = 16;
    int64_t count = 0;
    for (int64_t begin = 0; begin < size; begin += FEW) {
        const int64_t end = begin + FEW <= size ? begin + FEW : size;
        if (!any_at_least(logits + begin, end - begin, least)) continue;
        for (int64_t i = begin; i < end; ++i) {
            ids[count] = static_cast<int32_t>(i);
            kept[count] = logits[i];
            count += logits[i] >= least;
        }
    }
    return count;
}

int64_t count_above(const float* logits, int64_t size, float bound) {
    int32_t count = 0;
    for (int64_t i = 0; i < size; ++i) count += logits[i] > bound;
    return count;
}

}  // namespace

}  // namespace loramux
