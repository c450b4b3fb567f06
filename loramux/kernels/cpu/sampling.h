// One token per row of logits, and log-probabilities: `reference/sampling.py`, the same bit for bit whatever the instruction set, the
// number of threads and the other rows.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"

namespace loramux {

// Logits float32 [num_rows, vocab_size], contiguous, of fewer than 2^22 tokens each.
struct LogitRows {
    const float* logits;
    int64_t num_rows;
    int64_t vocab_size;
};

// How a row is drawn from.
struct SamplingRow {
    float temperature;  // 0 is greedy
    int64_t top_k;      // 0 keeps every token
    double top_p;
    float min_p;
    double noise;  // in [0, 1)
};

// The largest logit of each row, NaN where it has one. peaks [num_rows]
void row_peaks(const LogitRows& rows, float* peaks, Isa isa, int num_threads);

// A token of each row, -1 where no logit is finite or one is NaN or +inf. Throws std::invalid_argument for another number of rows.
std::vector<int64_t> choose_tokens(const LogitRows& rows, const std::vector<SamplingRow>& sampling, Isa isa, int num_threads);

// What is reported of each row.
struct Logprobs {
    float* values;     // [num_rows]: of the row's token
    int64_t* ranks;    // [num_rows]: 1 is the most likely
    int64_t k;
    int64_t* top_ids;   // [num_rows, k], the most likely first, of equals the lower id
    float* top_values;  // [num_rows, k]
};

// A row without a finite largest logit, or with NaN, gets NaN. Throws std::out_of_range where one of token_ids [num_rows] is not in the
// vocabulary, std::invalid_argument for a k that does not fit it; before anything is written.
void token_logprobs(const LogitRows& rows, const int64_t* token_ids, const Logprobs& logprobs, Isa isa, int num_threads);

}  // namespace loramux
