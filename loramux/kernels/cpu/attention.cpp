#include "attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bfloat16.h"

namespace loramux {

namespace {

// Keys of a part: as long as a thread may be kept waiting for another's last piece, about 50 us.
constexpr int64_t PART_KEYS = 1024;

void require(bool condition, const std::string& otherwise) {
    if (!condition) throw std::invalid_argument(otherwise);
}

void check(const AttentionShape& shape) {
    require(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "key heads that do not divide the heads");
    require(shape.head_dim > 0 && shape.head_dim % 2 == 0 && shape.head_dim <= MAX_HEAD_DIM,
            "head_dim " + std::to_string(shape.head_dim) + " is not an even number up to " + std::to_string(MAX_HEAD_DIM));
    require(shape.block_size > 0 && shape.block_size % 16 == 0, "blocks of " + std::to_string(shape.block_size) + ", not a multiple of 16");
    require(shape.window >= 0 && shape.scale > 0, "a negative window, or a scale that is not positive");
}

AttentionKernel attention_kernel(Isa isa, Dtype dtype) {
    require(is_supported(isa), "this machine does not run the instruction set asked for");
#ifdef LORAMUX_X86
    if (isa == Isa::AMX) return attention_amx(dtype);
    if (isa == Isa::AVX512_BF16) return attention_avx512_bf16(dtype);
    if (isa == Isa::AVX512) return attention_avx512(dtype);
    if (isa == Isa::AVX2) return attention_avx2(dtype);
#endif
    return attention_portable(dtype);
}

const void* at(const void* elements, int64_t index, Dtype dtype) { return static_cast<const char*>(elements) + index * itemsize(dtype); }

void* at(void* elements, int64_t index, Dtype dtype) { return const_cast<void*>(at(const_cast<const void*>(elements), index, dtype)); }

constexpr float LIMIT = 1e30f;

float storable(float value) { return value == value ? std::min(std::max(value, -LIMIT), LIMIT) : 0; }

Bfloat16 storable(Bfloat16 value) {
    const uint16_t limit = float_to_bfloat16(LIMIT), magnitude = value.bits & 0x7fff, sign = value.bits & 0x8000;
    if (magnitude > 0x7f80) return {0};
    return {static_cast<uint16_t>(sign | std::min(magnitude, limit))};
}

template <class T>
void write_kv(const AttentionShape& shape, const T* k, const T* v, const KvCache& cache, int64_t kv_slot) {
    constexpr int64_t TOGETHER = sizeof(float) / sizeof(T);
    const int64_t size = shape.head_dim, head = shape.block_size * size;
    const int64_t block = kv_slot / shape.block_size, offset = kv_slot % shape.block_size;
    T* to_k = static_cast<T*>(cache.k) + block * shape.num_kv_heads * head + offset * TOGETHER;
    T* to_v = static_cast<T*>(cache.v) + block * shape.num_kv_heads * head + offset / TOGETHER * size * TOGETHER + offset % TOGETHER;
    for (int64_t i = 0; i < shape.num_kv_heads; ++i, k += size, v += size, to_k += head, to_v += head) {
        for (int64_t d = 0; d < size; ++d) to_k[d / TOGETHER * shape.block_size * TOGETHER + d % TOGETHER] = storable(k[d]);
        for (int64_t d = 0; d < size; ++d) to_v[d * TOGETHER] = storable(v[d]);
    }
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionShape& shape, AttentionBatch batch, Isa isa)
    : shape_(shape), batch_(std::move(batch)), kernel_(attention_kernel(isa, shape.dtype)) {
    check(shape_);
    for (size_t sequence = 0; sequence < batch_.context_lens.size(); ++sequence) add_tasks(static_cast<int64_t>(sequence));
    std::sort(tasks_.begin(), tasks_.end(), [](const Task& one, const Task& other) { return one.cost() > other.cost(); });
    partials_.reset(new float[num_partials_]);
}

int64_t AttentionPlan::first_position(int64_t sequence) const {
    return batch_.context_lens[sequence] - (batch_.query_starts[sequence + 1] - batch_.query_starts[sequence]);
}

int64_t AttentionPlan::first_key(int64_t position) const {
    return shape_.window ? std::max<int64_t>(0, position + 1 - shape_.window) : 0;
}

void AttentionPlan::add_tasks(int64_t sequence) {
    const int64_t group = shape_.num_heads / shape_.num_kv_heads, first = first_position(sequence);
    const int64_t num_rows = (batch_.context_lens[sequence] - first) * group;
    for (int64_t row = 0; row < num_rows; row += MAX_PIECE_ROWS) {
        const int64_t end = std::min(row + MAX_PIECE_ROWS, num_rows);
        const Task task{sequence, row, end - row, first_key(first + row / group), first + (end - 1) / group + 1, -1, 0};
        num_rows <= MAX_PIECE_ROWS ? add_parts(task) : tasks_.push_back(task);
    }
}

void AttentionPlan::add_parts(const Task& whole) {
    const int64_t first = whole.key_begin / PART_KEYS, num_parts = (whole.key_end - 1) / PART_KEYS - first + 1;
    if (num_parts == 1) return tasks_.push_back(whole);
    const int64_t size = whole.num_rows * partial_size(shape_), stride = num_parts * size;
    joins_.push_back({whole.sequence, whole.num_rows, num_parts, num_partials_, stride});
    for (int64_t i = 0; i < num_parts; ++i) {
        Task part = whole;
        part.key_begin = std::max(whole.key_begin, (first + i) * PART_KEYS);
        part.key_end = std::min(whole.key_end, (first + i + 1) * PART_KEYS);
        part.partial = num_partials_ + i * size;
        part.partial_stride = stride;
        tasks_.push_back(part);
    }
    num_partials_ += stride * shape_.num_kv_heads;
}

int64_t AttentionPlan::num_pieces(int phase) const {
    return static_cast<int64_t>(phase == 0 ? tasks_.size() : joins_.size()) * shape_.num_kv_heads;
}

void AttentionPlan::run(int phase, int64_t piece, const void* q, int64_t q_stride, const KvCache& cache, void* out, int64_t out_stride) {
    const int64_t index = piece / shape_.num_kv_heads, kv_head = piece % shape_.num_kv_heads;
    if (phase == 1) {
        const Join& join = joins_[index];
        void* to = at(out, batch_.query_starts[join.sequence] * out_stride, shape_.dtype);
        float* partial = partials_.get() + join.partial + kv_head * join.partial_stride;
        return kernel_.join(shape_, {partial, join.num_rows * partial_size(shape_), join.num_parts, to, out_stride, kv_head, 0,
                                     join.num_rows});
    }
    const Task& task = tasks_[index];
    const int64_t row = batch_.query_starts[task.sequence];
    AttentionPiece of{};
    of.q = at(q, row * q_stride, shape_.dtype);
    of.q_stride = q_stride;
    of.out = at(out, row * out_stride, shape_.dtype);
    of.out_stride = out_stride;
    of.cache = &cache;
    of.blocks = batch_.block_tables + task.sequence * batch_.table_stride;
    of.kv_head = kv_head;
    of.first_row = task.first_row;
    of.num_rows = task.num_rows;
    of.first_position = first_position(task.sequence);
    of.key_begin = task.key_begin;
    of.key_end = task.key_end;
    if (task.partial >= 0) of.partial = partials_.get() + task.partial + kv_head * task.partial_stride;
    kernel_.attend(shape_, of);
}

void write_kv(const AttentionShape& shape, const void* k, const void* v, const KvCache& cache, int64_t kv_slot) {
    if (shape.dtype == Dtype::FLOAT32) return write_kv(shape, static_cast<const float*>(k), static_cast<const float*>(v), cache, kv_slot);
    write_kv(shape, static_cast<const Bfloat16*>(k), static_cast<const Bfloat16*>(v), cache, kv_slot);
}

}  // namespace loramux
