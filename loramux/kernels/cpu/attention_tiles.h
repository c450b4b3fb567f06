// The kernel of `attention_kernel.h` over a vector class V (`vectors.h`) and elements T, included once by the file of each instruction
// set. Softmax is taken online (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867): tile by tile of keys, with what was summed
// before scaled down whenever a higher score turns up.
//
// A row's sums run in one order whatever its companions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention_kernel.h"
#include "vectors.h"

namespace loramux {

namespace {

// Scores of a tile: few rows see many keys at a time.
constexpr int64_t TILE_SCORES = 4096;
constexpr int64_t FEW_ROWS = 8;
constexpr int64_t LEAST_BLOCK = 16;
constexpr int64_t UNITS_AHEAD = 2;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct KeyTile {
    int64_t begin;
    int64_t end;
};

// The tile's keys by units of UNIT that lie together, `k` and `v` the address of each unit's first element.
template <class T, int UNIT>
struct KeyUnits {
    static constexpr int64_t MOST = TILE_SCORES / FEW_ROWS / UNIT;

    const T* k[MOST];
    const T* v[MOST];
    int64_t count;
};

// Columns [first, first + W) of a row of values, or all of a shorter one. The last strip of a row may overlap the one before.
template <class V>
struct Strips {
    explicit Strips(int64_t head_dim) : head_dim(head_dim), count((head_dim + V::W - 1) / V::W) {}

    int64_t first(int64_t strip) const { return std::max<int64_t>(0, std::min(strip * V::W, head_dim - V::W)); }
    bool whole() const { return head_dim >= V::W; }
    int64_t stride() const { return count * V::W; }

    const int64_t head_dim;
    const int64_t count;
};

// q . k of ROWS rows and STRIPS strips of keys, W each. The strips `ahead` are fetched meanwhile: a block's keys of one head are about a
// page, at whose end hardware stops.
template <class V, class T, int ROWS, int STRIPS>
void score_tile(const T* q, int64_t q_stride, const T* const (&k)[STRIPS], const T* const (&ahead)[STRIPS], int64_t k_stride,
                int64_t num_steps, float* scores, int64_t scores_stride) {
    typename V::F sums[ROWS][STRIPS];
    for (auto& of_row : sums)
        for (auto& sum : of_row) sum = V::all(0);
    for (int64_t step = 0; step < num_steps; ++step) {
        typename V::template Packed<T> keys[STRIPS];
        for (int strip = 0; strip < STRIPS; ++strip) {
            __builtin_prefetch(ahead[strip] + step * k_stride, 0, TO_SECOND_LEVEL);
            keys[strip] = V::load_packed(k[strip] + step * k_stride);
        }
        for (int row = 0; row < ROWS; ++row) {
            const auto query = V::all_packed(q + row * q_stride + step * VNNI<T>);
            for (int strip = 0; strip < STRIPS; ++strip) sums[row][strip] = V::dot(sums[row][strip], query, keys[strip]);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int strip = 0; strip < STRIPS; ++strip) V::store(scores + row * scores_stride + strip * V::W, sums[row][strip]);
}

template <class V, class T, bool WHOLE>
[[gnu::always_inline]] inline typename V::template Packed<T> load_values(const T* from, int64_t head_dim) {
    if constexpr (WHOLE) return V::load_packed(from);
    T padded[V::W * VNNI<T>] = {};
    std::memcpy(padded, from, head_dim * VNNI<T> * sizeof(T));
    return V::load_packed(padded);
}

// sums = decay * sums + weights . v, of ROWS rows and STRIPS strips from `strip`.
template <class V, class T, bool WHOLE, int ROWS, int STRIPS>
void value_tile(const T* weights, int64_t weights_stride, const KeyUnits<T, LEAST_BLOCK>& keys, const Strips<V>& strips, int64_t strip,
                const float* decay, float* sums, int64_t sums_stride) {
    typename V::F total[ROWS][STRIPS];
    for (int row = 0; row < ROWS; ++row)
        for (int s = 0; s < STRIPS; ++s)
            total[row][s] = V::multiply(V::load(sums + row * sums_stride + (strip + s) * V::W), V::all(decay[row]));
    int64_t first[STRIPS];
    for (int s = 0; s < STRIPS; ++s) first[s] = strips.first(strip + s) * VNNI<T>;
    for (int64_t unit = 0; unit < keys.count; ++unit) {
        const T *v = keys.v[unit], *ahead = keys.v[std::min(unit + UNITS_AHEAD, keys.count - 1)];
        for (int64_t step = 0; step < LEAST_BLOCK / VNNI<T>; ++step, weights += VNNI<T>) {
            const int64_t row_start = step * strips.head_dim * VNNI<T>;
            typename V::template Packed<T> values[STRIPS];
            for (int s = 0; s < STRIPS; ++s) {
                __builtin_prefetch(ahead + row_start + first[s], 0, TO_SECOND_LEVEL);
                values[s] = load_values<V, T, WHOLE>(v + row_start + first[s], strips.head_dim);
            }
            for (int row = 0; row < ROWS; ++row) {
                const auto weight = V::all_packed(weights + row * weights_stride);
                for (int s = 0; s < STRIPS; ++s) total[row][s] = V::dot(total[row][s], weight, values[s]);
            }
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int s = 0; s < STRIPS; ++s) V::store(sums + row * sums_stride + (strip + s) * V::W, total[row][s]);
}

// Calls visit(std::integral_constant<int, N>, start) for parts of [start, size), MOST long or at the end what is left.
template <int MOST, class Visit>
[[gnu::always_inline]] inline void in_parts(int64_t start, int64_t size, Visit visit) {
    for (; start + MOST <= size; start += MOST) visit(std::integral_constant<int, MOST>(), start);
    if constexpr (MOST > 1) in_parts<MOST - 1>(start, size, visit);
}

// The products of a piece by vectors.
template <class V, class T>
struct VectorProducts {
    using Vectors = V;
    using Element = T;
    static constexpr int UNIT = LEAST_BLOCK;
    static constexpr int ROWS = 4;
    static constexpr int STRIPS = V::W == 16 ? 4 : 2;

    static int64_t padded_rows(int64_t num_rows) { return num_rows; }

    // scores [num_rows, units of keys] of queries [num_rows, head_dim].
    static void score(const AttentionShape& shape, int64_t num_rows, const T* queries, const KeyUnits<T, UNIT>& keys, float* scores,
                      int64_t scores_stride) {
        constexpr int PER_UNIT = UNIT / V::W;
        const int64_t size = shape.head_dim, k_stride = shape.block_size * VNNI<T>, total = keys.count * PER_UNIT;
        const auto address = [&](int64_t strip) { return keys.k[strip / PER_UNIT] + strip % PER_UNIT * V::W * VNNI<T>; };
        in_parts<STRIPS>(0, total, [&](auto num_strips, int64_t strip) {
            const T *k[num_strips], *ahead[num_strips];
            for (int s = 0; s < num_strips; ++s) {
                k[s] = address(strip + s);
                ahead[s] = address(std::min(strip + s + num_strips, total - 1));
            }
            in_parts<ROWS>(0, num_rows, [&](auto rows, int64_t row) {
                score_tile<V, T, rows, num_strips>(queries + row * size, size, k, ahead, k_stride, size / VNNI<T>,
                                                   scores + row * scores_stride + strip * V::W, scores_stride);
            });
        });
    }

    // sums [num_rows, strips of columns] = decay * sums + weights . v
    static void add_values(const AttentionShape& shape, int64_t num_rows, const T* weights, int64_t weights_stride,
                           const KeyUnits<T, UNIT>& keys, const float* decay, float* sums) {
        const Strips<V> strips(shape.head_dim);
        const auto add = [&](auto whole, auto num_strips, int64_t strip) {
            in_parts<ROWS>(0, num_rows, [&](auto rows, int64_t row) {
                value_tile<V, T, whole, rows, num_strips>(weights + row * weights_stride, weights_stride, keys, strips, strip, decay + row,
                                                          sums + row * strips.stride(), strips.stride());
            });
        };
        if (!strips.whole()) return add(std::false_type(), std::integral_constant<int, 1>(), 0);
        in_parts<STRIPS>(0, strips.count, [&](auto num_strips, int64_t strip) { add(std::true_type(), num_strips, strip); });
    }
};

// What a row has summed so far: weights relative to the highest of its scores.
struct RowState {
    float highest = NOTHING;
    float total = 0;
};

// Weights [size] of a row that sees the tile's keys [begin, end), 0 for the others; scores are overwritten where it sees nothing. Returns
// what earlier sums are to be multiplied by.
template <class V, class T>
float soften(const AttentionShape& shape, float* scores, int64_t size, int64_t begin, int64_t end, T* weights, RowState& state) {
    if (begin >= end) {
        std::memset(weights, 0, size * sizeof(T));
        return 1;
    }
    const int64_t first = begin / V::W * V::W, last = (end + V::W - 1) / V::W * V::W;
    std::fill(scores + first, scores + begin, NOTHING);
    std::fill(scores + end, scores + last, NOTHING);
    std::memset(weights, 0, first * sizeof(T));
    std::memset(weights + last, 0, (size - last) * sizeof(T));

    typename V::F highest = V::load(scores + first);
    for (int64_t i = first + V::W; i < last; i += V::W) highest = V::max(highest, V::load(scores + i));
    const float before = state.highest;
    state.highest = std::max(before, V::highest(highest) * shape.scale);

    const auto scale = V::all(shape.scale), shift = V::all(-state.highest);
    typename V::F total = V::all(0);
    for (int64_t i = first; i < last; i += V::W) {
        const auto weight = V::exp(V::multiply_add(V::load(scores + i), scale, shift));
        total = V::add(total, weight);
        V::store(weights + i, weight);
    }
    const float decay = std::exp(before - state.highest);
    state.total = state.total * decay + V::total(total);
    return decay;
}

// One piece on one thread's stack.
template <class Products>
class Attention {
   public:
    Attention(const AttentionShape& shape, const AttentionPiece& of)
        : shape_(shape), of_(of), group_(shape.num_heads / shape.num_kv_heads), strips_(shape.head_dim) {}

    void run() {
        const int64_t num_rows = Products::padded_rows(of_.num_rows);
        gather_queries(num_rows);
        std::memset(sums_, 0, num_rows * strips_.stride() * sizeof(float));
        const int64_t tile_keys = TILE_SCORES / (num_rows <= FEW_ROWS ? FEW_ROWS : MAX_PIECE_ROWS);
        for (int64_t begin = of_.key_begin / UNIT * UNIT; begin < of_.key_end; begin += tile_keys)
            attend_tile(num_rows, {begin, std::min(begin + tile_keys, of_.key_end)});
        for (int64_t row = 0; row < of_.num_rows; ++row) of_.partial ? keep(row) : finish(row);
    }

   private:
    using V = typename Products::Vectors;
    using T = typename Products::Element;
    static constexpr int UNIT = Products::UNIT;

    int64_t position(int64_t row) const { return of_.first_position + (of_.first_row + row) / group_; }

    // Of a row's first element in a matrix of rows of all heads.
    int64_t offset(int64_t row, int64_t stride) const {
        const int64_t index = of_.first_row + row;
        return index / group_ * stride + (of_.kv_head * group_ + index % group_) * shape_.head_dim;
    }

    void gather_queries(int64_t num_rows) {
        const int64_t size = shape_.head_dim;
        for (int64_t row = 0; row < of_.num_rows; ++row)
            std::memcpy(queries_ + row * size, static_cast<const T*>(of_.q) + offset(row, of_.q_stride), size * sizeof(T));
        std::memset(queries_ + of_.num_rows * size, 0, (num_rows - of_.num_rows) * size * sizeof(T));
    }

    void find_units(const KeyTile& tile) {
        const int64_t head = shape_.block_size * shape_.head_dim;
        units_.count = 0;
        for (int64_t key = tile.begin; key < tile.end; key += UNIT) {
            const int64_t start = (of_.blocks[key / shape_.block_size] * shape_.num_kv_heads + of_.kv_head) * head;
            const int64_t within = key % shape_.block_size;
            units_.k[units_.count] = static_cast<const T*>(of_.cache->k) + start + within * VNNI<T>;
            units_.v[units_.count++] = static_cast<const T*>(of_.cache->v) + start + within * shape_.head_dim;
        }
    }

    void attend_tile(int64_t num_rows, const KeyTile& tile) {
        find_units(tile);
        const int64_t size = units_.count * UNIT;
        Products::score(shape_, num_rows, queries_, units_, scores_, size);
        for (int64_t row = 0; row < num_rows; ++row) {
            const auto [begin, end] = seen(row, tile);
            decay_[row] = soften<V>(shape_, scores_ + row * size, size, begin, end, weights_ + row * size, states_[row]);
        }
        Products::add_values(shape_, num_rows, weights_, size, units_, decay_, sums_);
    }

    // Of the tile's keys, counted from its begin.
    KeyTile seen(int64_t row, const KeyTile& tile) const {
        if (row >= of_.num_rows) return {0, 0};
        const int64_t last = position(row), first = shape_.window ? std::max<int64_t>(0, last + 1 - shape_.window) : 0;
        return {std::max({first, tile.begin, of_.key_begin}) - tile.begin, std::min(last + 1, tile.end) - tile.begin};
    }

    void keep(int64_t row) const {
        float* to = of_.partial + row * partial_size(shape_);
        to[0] = states_[row].highest;
        to[1] = states_[row].total;
        each_strip(row, [&](int64_t first, typename V::F sums, auto store) { store(to + 2 + first, sums); });
    }

    void finish(int64_t row) const {
        T* to = static_cast<T*>(of_.out) + offset(row, of_.out_stride);
        const auto share = V::all(1 / states_[row].total);
        each_strip(row, [&](int64_t first, typename V::F sums, auto store) { store(to + first, V::multiply(sums, share)); });
    }

    template <class Visit>
    void each_strip(int64_t row, Visit visit) const {
        const float* sums = sums_ + row * strips_.stride();
        if (!strips_.whole()) {
            return visit(0, V::load(sums), [&](auto* to, typename V::F values) { V::store(to, values, shape_.head_dim); });
        }
        for (int64_t strip = 0; strip < strips_.count; ++strip)
            visit(strips_.first(strip), V::load(sums + strip * V::W), [](auto* to, typename V::F values) { V::store(to, values); });
    }

    const AttentionShape& shape_;
    const AttentionPiece& of_;
    const int64_t group_;
    const Strips<V> strips_;
    KeyUnits<T, UNIT> units_;
    RowState states_[MAX_PIECE_ROWS];
    float decay_[MAX_PIECE_ROWS];
    alignas(64) float scores_[TILE_SCORES];
    alignas(64) T weights_[TILE_SCORES];
    alignas(64) T queries_[MAX_PIECE_ROWS * MAX_HEAD_DIM];
    alignas(64) float sums_[MAX_PIECE_ROWS * MAX_HEAD_DIM];
};

template <class Products>
void attend(const AttentionShape& shape, const AttentionPiece& piece) {
    Attention<Products>(shape, piece).run();
}

template <class V, class T>
void join_row(const AttentionShape& shape, const AttentionJoin& of, float* partial, T* out) {
    float highest = NOTHING, total = 0;
    for (int64_t part = 0; part < of.num_parts; ++part) highest = std::max(highest, partial[part * of.part_stride]);
    for (int64_t part = 0; part < of.num_parts; ++part) {
        float* sums = partial + part * of.part_stride;
        sums[0] = std::exp(sums[0] - highest);
        total += sums[0] * sums[1];
    }
    for (int64_t column = 0; column < shape.head_dim; column += V::W) {
        const int64_t count = std::min<int64_t>(V::W, shape.head_dim - column);
        typename V::F sum = V::all(0);
        for (int64_t part = 0; part < of.num_parts; ++part) {
            const float* sums = partial + part * of.part_stride;
            const float* values = sums + 2 + column;
            sum = V::multiply_add(V::all(sums[0]), count == V::W ? V::load(values) : V::load(values, count), sum);
        }
        sum = V::multiply(sum, V::all(1 / total));
        count == V::W ? V::store(out + column, sum) : V::store(out + column, sum, count);
    }
}

template <class V, class T>
void join(const AttentionShape& shape, const AttentionJoin& of) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    for (int64_t r = 0; r < of.num_rows; ++r) {
        const int64_t row = of.first_row + r, head = of.kv_head * group + row % group;
        T* out = static_cast<T*>(of.out) + row / group * of.out_stride + head * shape.head_dim;
        join_row<V, T>(shape, of, of.partial + r * partial_size(shape), out);
    }
}

template <class V, class T>
constexpr AttentionKernel ATTENTION = {attend<VectorProducts<V, T>>, join<V, T>};

template <class V>
AttentionKernel attention_over(Dtype dtype) {
    return dtype == Dtype::FLOAT32 ? ATTENTION<V, float> : ATTENTION<V, Bfloat16>;
}

}  // namespace

}  // namespace loramux
