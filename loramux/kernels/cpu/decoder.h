// A decoder's forward pass whole: embedding, layers, head, for the tokens of many sequences at once.
#pragma once

#include <vector>

#include "attention.h"
#include "lora.h"
#include "matmul.h"
#include "row_ops.h"
#include "scratch.h"
#include "team_size.h"
#include "team.h"

namespace loramux {

// A linear layer; bias of the weight's activations' dtype, or null.
struct Linear {
    PackedWeight weight;
    const void* bias;
};

// Pre-norm: x += o(attention(qkv(norm(x)))), x += down(silu(gate) * up of gate_up(norm(x))). Norm weights are of the model's dtype; q_norm
// and k_norm [head_dim] are per head, or null. qkv and gate_up are stacked in this order.
struct DecoderLayer {
    const void* input_norm;
    Linear qkv;
    const void* q_norm;
    const void* k_norm;
    Linear o;
    const void* post_attention_norm;
    Linear gate_up;
    Linear down;
};

// Refers to memory that its owner keeps.
struct DecoderWeights {
    PackedWeight embedding;
    std::vector<DecoderLayer> layers;
    const void* norm;
    Linear head;
    float rms_norm_eps;
};

// Of every layer.
struct KvCaches {
    std::vector<KvCache> layers;
    int64_t block_size;
};

// T tokens of one step. cos and sin float32 [T, head_dim]; kv_slots [T]; logits float32 [num_logit_rows, vocab_size] of the rows named.
// `lora` is of the batch's rows, `logit_lora` of the rows of the logits; null where no adapter is asked for.
struct DecoderBatch {
    int64_t num_tokens;
    const int64_t* token_ids;
    const float* cos;
    const float* sin;
    AttentionBatch attention;
    const int64_t* kv_slots;
    const int64_t* logit_rows;
    int64_t num_logit_rows;
    float* logits;
    LoraPlan* lora;
    LoraPlan* logit_lora;
};

// Rows between layers, each buffer with rows of its own stride; what products read is padded with zeros (`matmul.h`).
struct Activations {
    Matrix x, normed, wide, attended, gated, y, of_logits;
};

// One thread at a time uses a decoder. A token's result does not depend on the number of threads.
class Decoder {
   public:
    // `attention` without a block size, which comes with the caches; num_threads at most. Linear layers have the sites 4 * layer + 0 to 3 (qkv, o, gate_up, down) of adapters, the head the last one.
    Decoder(AttentionShape attention, DecoderWeights weights, Isa isa, int num_threads);

    // Writes keys and values to `caches`. The caller has checked that the batch fits.
    void forward(const DecoderBatch& batch, const KvCaches& caches);

   private:
    friend class DecoderPass;

    Activations activations(int64_t num_tokens, int64_t num_logit_rows);

    AttentionShape attention_;
    DecoderWeights weights_;
    Isa isa_;
    TeamSize team_size_;
    RowOps rows_;
    MatmulKernel matmul_;
    MatmulKernel matmul_float32_;
    Scratch scratch_[7];
};

}  // namespace loramux
