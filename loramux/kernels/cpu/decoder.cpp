#include "decoder.h"

#include <algorithm>
#include <chrono>

namespace loramux {

namespace {

// How many parts a thread's share of a phase comes in: enough to even out, few enough that taking one costs nothing beside it.
constexpr int64_t PARTS_EACH = 8;

void* row_of(const Matrix& matrix, int64_t row, Dtype dtype) {
    return static_cast<char*>(matrix.elements) + row * matrix.stride * itemsize(dtype);
}

void* at(void* row, int64_t index, Dtype dtype) { return static_cast<char*>(row) + index * itemsize(dtype); }

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int64_t part_of(int64_t size, const Member& member, int64_t least) { return std::max(least, size / (PARTS_EACH * member.count)); }

}  // namespace

// One member's way through one batch.
class DecoderPass {
   public:
    DecoderPass(const Decoder& decoder, const AttentionShape& shape, const DecoderBatch& batch, const KvCaches& caches,
                AttentionPlan& attention, const Activations& to, Member& member)
        : decoder_(decoder), weights_(decoder.weights_), shape_(shape), rows_(decoder.rows_), batch_(batch), caches_(caches.layers),
          attention_(attention), to_(to), dtype_(shape.dtype), member_(member) {}

    void run() {
        embed();
        normalise(to_.normed, weights_.layers.empty() ? weights_.norm : weights_.layers[0].input_norm);
        for (size_t layer = 0; layer < weights_.layers.size(); ++layer) run_layer(layer);
        if (batch_.num_logit_rows) compute_logits();
    }

   private:
    void run_layer(size_t index) {
        const DecoderLayer& layer = weights_.layers[index];
        const size_t site = 4 * index;
        multiply(site, layer.qkv, to_.normed, to_.wide);
        rotate_and_store(layer, caches_[index]);
        attend(caches_[index]);
        multiply(site + 1, layer.o, to_.attended, to_.y);
        add_and_normalise(layer.post_attention_norm);
        multiply(site + 2, layer.gate_up, to_.normed, to_.wide);
        gate(layer);
        multiply(site + 3, layer.down, to_.gated, to_.y);
        const bool is_last = index + 1 == weights_.layers.size();
        add_and_normalise(is_last ? nullptr : weights_.layers[index + 1].input_norm);
    }

    void embed() {
        each_row([&](int64_t row) { unpack_row(weights_.embedding, batch_.token_ids[row], row_of(to_.x, row, dtype_)); });
        if (batch_.lora && batch_.lora->changes_embedding()) batch_.lora->update_embedding(to_.x, batch_.token_ids, member_);
    }

    // y = linear(x), with what each row's adapter adds.
    void multiply(size_t site, const Linear& linear, const Matrix& x, const Matrix& y) {
        multiply(site, linear, x, y, batch_.lora, decoder_.matmul_, false);
    }

    void multiply(size_t site, const Linear& linear, const Matrix& x, const Matrix& y, LoraPlan* lora, MatmulKernel kernel,
                  bool y_is_float32) {
        const Matmul product{x.elements, x.stride, x.num_rows, linear.weight, linear.bias, y.elements, y.stride};
        const int64_t num_blocks = num_column_blocks(linear.weight.out_features);
        const auto base = [&] {
            member_.take(num_blocks, part_of(num_blocks, member_, 2), [&](int64_t begin, int64_t end) { kernel(product, begin, end); });
        };
        if (lora && lora->changes(site)) return lora->update(site, y, y_is_float32, x, member_, base);
        base();
        member_.meet();
    }

    void rotate_and_store(const DecoderLayer& layer, const KvCache& cache) {
        const int64_t size = shape_.head_dim, num_rotated = shape_.num_heads + shape_.num_kv_heads;
        each_row([&](int64_t row) {
            void* qkv = row_of(to_.wide, row, dtype_);
            for (int64_t head = 0; head < num_rotated; ++head) {
                void* values = at(qkv, head * size, dtype_);
                const void* norm = head < shape_.num_heads ? layer.q_norm : layer.k_norm;
                if (norm) rows_.rms_norm(values, norm, weights_.rms_norm_eps, size, values);
                rows_.rotate(values, batch_.cos + row * size, batch_.sin + row * size, size);
            }
            write_kv(shape_, at(qkv, shape_.num_heads * size, dtype_), at(qkv, num_rotated * size, dtype_), cache, batch_.kv_slots[row]);
        });
    }

    void attend(const KvCache& cache) {
        for (int phase = 0; phase < 2; ++phase) {
            const int64_t num_pieces = attention_.num_pieces(phase);
            if (!num_pieces) continue;
            member_.share(num_pieces, 1, [&](int64_t begin, int64_t end) {
                for (int64_t piece = begin; piece < end; ++piece)
                    attention_.run(phase, piece, to_.wide.elements, to_.wide.stride, cache, to_.attended.elements, to_.attended.stride);
            });
        }
    }

    void gate(const DecoderLayer& layer) {
        const int64_t size = layer.down.weight.in_features;
        each_row([&](int64_t row) {
            void* gate_up = row_of(to_.wide, row, dtype_);
            rows_.silu_mul(gate_up, at(gate_up, size, dtype_), size, row_of(to_.gated, row, dtype_));
        });
    }

    // x += y, and its norm unless `norm` is null: the last layer's output is normalised where logits are wanted.
    void add_and_normalise(const void* norm) {
        each_row([&](int64_t row) {
            void* x = row_of(to_.x, row, dtype_);
            rows_.add(x, row_of(to_.y, row, dtype_), to_.x.num_columns);
            if (norm) normalise_row(x, norm, to_.normed, row);
        });
    }

    void normalise(const Matrix& y, const void* norm) {
        each_row([&](int64_t row) { normalise_row(row_of(to_.x, row, dtype_), norm, y, row); });
    }

    void normalise_row(const void* x, const void* norm, const Matrix& y, int64_t row) {
        rows_.rms_norm(x, norm, weights_.rms_norm_eps, to_.x.num_columns, row_of(y, row, dtype_));
    }

    void compute_logits() {
        member_.share(batch_.num_logit_rows, part_of(batch_.num_logit_rows, member_, 1), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row)
                normalise_row(row_of(to_.x, batch_.logit_rows[row], dtype_), weights_.norm, to_.of_logits, row);
        });
        const int64_t vocab_size = weights_.head.weight.out_features;
        const Matrix logits{batch_.logits, batch_.num_logit_rows, vocab_size, vocab_size};
        multiply(4 * weights_.layers.size(), weights_.head, to_.of_logits, logits, batch_.logit_lora, decoder_.matmul_float32_, true);
    }

    template <class Work>
    void each_row(Work work) {
        member_.share(batch_.num_tokens, part_of(batch_.num_tokens, member_, 1), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) work(row);
        });
    }

    const Decoder& decoder_;
    const DecoderWeights& weights_;
    const AttentionShape& shape_;
    const RowOps& rows_;
    const DecoderBatch& batch_;
    const std::vector<KvCache>& caches_;
    AttentionPlan& attention_;
    const Activations& to_;
    const Dtype dtype_;
    Member& member_;
};

Decoder::Decoder(AttentionShape attention, DecoderWeights weights, Isa isa, int num_threads)
    : attention_(attention), weights_(std::move(weights)), isa_(isa), team_size_(num_threads), rows_(row_ops(isa, attention.dtype)),
      matmul_(matmul_kernel(isa, attention.dtype, false)), matmul_float32_(matmul_kernel(isa, attention.dtype, true)) {}

void Decoder::forward(const DecoderBatch& batch, const KvCaches& caches) {
    AttentionShape shape = attention_;
    shape.block_size = caches.block_size;
    AttentionPlan attention(shape, batch.attention, isa_);
    const Activations to = activations(batch.num_tokens, batch.num_logit_rows);
    const double start = seconds();
    const double cpu_seconds = Team::run(team_size_.choose(start), [&](Member& member) {
        begin_tiles(isa_);
        DecoderPass(*this, shape, batch, caches, attention, to, member).run();
        end_tiles(isa_);
    });
    const double end = seconds();
    team_size_.observe(end, end - start, cpu_seconds);
}

Activations Decoder::activations(int64_t num_tokens, int64_t num_logit_rows) {
    int64_t widest = 0, gated = 0;
    for (const auto& layer : weights_.layers) {
        widest = std::max({widest, layer.qkv.weight.out_features, layer.gate_up.weight.out_features});
        gated = std::max(gated, layer.down.weight.in_features);
    }
    const int64_t hidden = weights_.embedding.in_features, query = attention_.num_heads * attention_.head_dim;
    int next = 0;
    const auto matrix = [&](int64_t num_rows, int64_t num_columns, bool is_padded) {
        const int64_t stride = is_padded ? padded_inputs(num_columns) : num_columns;
        return Matrix{scratch_[next++].reserve(num_rows * stride * itemsize(attention_.dtype)), num_rows, num_columns, stride};
    };
    Activations to;
    to.x = matrix(num_tokens, hidden, false);
    to.normed = matrix(num_tokens, hidden, true);
    to.wide = matrix(num_tokens, widest, false);
    to.attended = matrix(num_tokens, query, true);
    to.gated = matrix(num_tokens, gated, true);
    to.y = matrix(num_tokens, hidden, false);
    to.of_logits = matrix(num_logit_rows, hidden, true);
    return to;
}

}  // namespace loramux
