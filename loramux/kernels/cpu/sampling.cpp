#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "sampling_kernel.h"

namespace loramux {

SamplingKernel sampling_kernel(Isa isa) {
    if (!is_supported(isa)) throw std::invalid_argument("this machine does not run the instruction set asked for");
#ifdef LORAMUX_X86
    if (isa >= Isa::AVX512) return sampling_avx512();
    if (isa == Isa::AVX2) return sampling_avx2();
#endif
    return sampling_portable();
}

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
// In temperatures below the peak: from here on a token weighs nothing.
constexpr float WEIGHTLESS = 30.0f;
// How far below the peak, in temperatures, the tokens of top_p are looked for at first, and then.
constexpr float REACHES[] = {6.0f, 12.0f, WEIGHTLESS};

struct Token {
    float logit;
    int32_t id;
};

// Of equals, the lower id first.
bool is_ahead(const Token& p, const Token& q) { return p.logit > q.logit || (p.logit == q.logit && p.id < q.id); }

struct Weighted {
    float logit;
    int64_t weight;
};

bool is_likelier(const Weighted& p, const Weighted& q) { return p.logit > q.logit; }

int64_t total(const std::vector<int64_t>& weights) { return std::accumulate(weights.begin(), weights.end(), int64_t{0}); }

// A row of logits that has a finite peak and no NaN. Buffers keep their memory from row to row.
class Row {
   public:
    Row(const SamplingKernel& kernel, int64_t vocab_size)
        : kernel_(kernel), size_(vocab_size), maxima_((vocab_size + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK),
          spans_((vocab_size + SAMPLING_SPAN - 1) / SAMPLING_SPAN), ids_(vocab_size) {}

    // False where the row is not as said; it is not to be used then.
    bool read(const float* logits) {
        logits_ = logits;
        peak_ = kernel_.peak(logits, size_, maxima_.data());
        return std::isfinite(peak_);
    }

    int64_t most_likely() const {
        const auto block = std::find(maxima_.begin(), maxima_.end(), peak_) - maxima_.begin();
        return std::find(logits_ + block * SAMPLING_BLOCK, logits_ + size_, peak_) - logits_;
    }

    int64_t draw(float temperature, int64_t top_k, double top_p, float min_p, double noise) {
        weigh_at(temperature, min_p);
        const bool has_k = top_k > 0 && top_k < size_, has_p = top_p < 1;
        if (!has_k && !has_p) return draw_any(noise);
        if (has_k) keep_most_likely(top_k);
        if (has_k && has_p) keep_nucleus(wanted(total(weights_), top_p));
        if (!has_k) keep_nucleus_of_all(top_p);
        return draw_kept(noise);
    }

    // log of the sum of e^logit
    double log_total() {
        weigh_at(1.0f, 0.0f);
        kernel_.sum_spans(logits_, size_, weighing_, spans_.data());
        return peak_ + std::log(std::ldexp(static_cast<double>(total(spans_)), -40));
    }

    int64_t rank(int64_t token_id) const { return kernel_.count_above(logits_, size_, logits_[token_id]) + 1; }

    // The first k by `is_ahead`.
    const std::vector<Token>& top(int64_t k) {
        collect(least_of_best(k));
        top_.clear();
        for (size_t i = 0; i < logits_kept_.size(); ++i) top_.push_back({logits_kept_[i], ids_[i]});
        std::partial_sort(top_.begin(), top_.begin() + k, top_.end(), is_ahead);
        return top_;
    }

   private:
    // At least k tokens have this logit or more, and few others: k blocks have it as their largest or more.
    float least_of_best(int64_t k) {
        if (k > static_cast<int64_t>(maxima_.size())) return LOWEST;
        best_ = maxima_;
        std::nth_element(best_.begin(), best_.begin() + (k - 1), best_.end(), std::greater<>());
        return best_[k - 1];
    }

    void weigh_at(float temperature, float min_p) {
        temperature_ = temperature;
        weighing_ = {peak_, 1.0f / temperature, min_p};
    }

    // Keep the tokens of at least this logit.
    void collect(float least) {
        const int64_t count = kernel_.collect(logits_, size_, least, ids_.data());
        logits_kept_.resize(count);
        for (int64_t i = 0; i < count; ++i) logits_kept_[i] = logits_[ids_[i]];
    }

    void weigh_kept() {
        weights_.resize(logits_kept_.size());
        kernel_.weigh(logits_kept_.data(), logits_kept_.size(), weighing_, weights_.data());
    }

    void keep_most_likely(int64_t k) {
        collect(std::max(least_of_best(k), peak_ - WEIGHTLESS * temperature_));
        if (k < static_cast<int64_t>(logits_kept_.size())) {
            best_ = logits_kept_;
            std::nth_element(best_.begin(), best_.begin() + (k - 1), best_.end(), std::greater<>());
            drop_below(best_[k - 1]);
        }
        weigh_kept();
    }

    void drop_below(float least) {
        size_t count = 0;
        for (size_t i = 0; i < logits_kept_.size(); ++i) {
            ids_[count] = ids_[i];
            logits_kept_[count] = logits_kept_[i];
            count += logits_kept_[i] >= least;
        }
        logits_kept_.resize(count);
    }

    void keep_nucleus_of_all(double top_p) {
        kernel_.sum_spans(logits_, size_, weighing_, spans_.data());
        const int64_t weight = wanted(total(spans_), top_p);
        for (float reach : REACHES) {
            collect(peak_ - reach * temperature_);
            weigh_kept();
            if (total(weights_) >= weight) break;
        }
        keep_nucleus(weight);
    }

    static int64_t wanted(int64_t weight, double top_p) {
        const int64_t part = static_cast<int64_t>(std::ceil(static_cast<double>(weight) * top_p));
        return std::clamp<int64_t>(part, 1, weight);
    }

    // Of the tokens kept, the most likely that reach the weight, and their equals.
    void keep_nucleus(int64_t weight) {
        nucleus_.clear();
        for (size_t i = 0; i < weights_.size(); ++i) nucleus_.push_back({logits_kept_[i], weights_[i]});
        const float least = least_reaching(weight);
        for (size_t i = 0; i < weights_.size(); ++i)
            if (logits_kept_[i] < least) weights_[i] = 0;
    }

    // The logit of the token with which the weight is reached, the most likely first. The answer is always within [begin, end).
    float least_reaching(int64_t weight) {
        auto begin = nucleus_.begin(), end = nucleus_.end();
        while (end - begin > 1) {
            const auto middle = begin + (end - begin) / 2;
            std::nth_element(begin, middle, end, is_likelier);
            const int64_t ahead = std::accumulate(begin, middle, int64_t{0}, [](int64_t sum, const Weighted& each) { return sum + each.weight; });
            if (ahead >= weight) {
                end = middle;
            } else {
                begin = middle;
                weight -= ahead;
            }
        }
        return begin->logit;
    }

    static int64_t target(int64_t weight, double noise) {
        return std::min(static_cast<int64_t>(noise * static_cast<double>(weight)), weight - 1);
    }

    // The first token at which the sum of the weights passes the target.
    static size_t passing(const std::vector<int64_t>& weights, int64_t& target) {
        size_t i = 0;
        while (target >= weights[i]) target -= weights[i++];
        return i;
    }

    int64_t draw_kept(double noise) {
        int64_t left = target(total(weights_), noise);
        return ids_[passing(weights_, left)];
    }

    int64_t draw_any(double noise) {
        kernel_.sum_spans(logits_, size_, weighing_, spans_.data());
        int64_t left = target(total(spans_), noise);
        const int64_t begin = passing(spans_, left) * SAMPLING_SPAN;
        weights_.resize(std::min(SAMPLING_SPAN, size_ - begin));
        kernel_.weigh(logits_ + begin, weights_.size(), weighing_, weights_.data());
        return begin + passing(weights_, left);
    }

    const SamplingKernel kernel_;
    const int64_t size_;
    const float* logits_ = nullptr;
    float peak_ = 0;
    float temperature_ = 0;
    Weighing weighing_{};
    std::vector<float> maxima_;   // of blocks
    std::vector<int64_t> spans_;  // their weights
    std::vector<int32_t> ids_;    // of the tokens kept, in order; the first logits_kept_.size()
    std::vector<float> logits_kept_;
    std::vector<int64_t> weights_;
    std::vector<float> best_;
    std::vector<Weighted> nucleus_;
    std::vector<Token> top_;
};

// Calls work(row of logits, its number) for each, with a Row for each thread.
template <class Work>
void for_each_row(const LogitRows& rows, Isa isa, int num_threads, Work work) {
    const SamplingKernel kernel = sampling_kernel(isa);
#pragma omp parallel num_threads(static_cast<int>(std::clamp<int64_t>(rows.num_rows, 1, num_threads)))
    {
        Row row(kernel, rows.vocab_size);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < rows.num_rows; ++i) work(row, i);
    }
}

void report_nothing(const Logprobs& logprobs, int64_t i) {
    constexpr float UNKNOWN = std::numeric_limits<float>::quiet_NaN();
    logprobs.values[i] = UNKNOWN;
    logprobs.ranks[i] = 1;
    std::iota(logprobs.top_ids + i * logprobs.k, logprobs.top_ids + (i + 1) * logprobs.k, int64_t{0});
    std::fill_n(logprobs.top_values + i * logprobs.k, logprobs.k, UNKNOWN);
}

}  // namespace

void row_peaks(const LogitRows& rows, float* peaks, Isa isa, int num_threads) {
    const SamplingKernel kernel = sampling_kernel(isa);
#pragma omp parallel for num_threads(static_cast<int>(std::clamp<int64_t>(rows.num_rows, 1, num_threads))) schedule(dynamic)
    for (int64_t i = 0; i < rows.num_rows; ++i) peaks[i] = kernel.peak(rows.logits + i * rows.vocab_size, rows.vocab_size, nullptr);
}

void choose_tokens(const LogitRows& rows, const SamplingRows& sampling, int64_t* token_ids, Isa isa, int num_threads) {
    for_each_row(rows, isa, num_threads, [&](Row& row, int64_t i) {
        if (!row.read(rows.logits + i * rows.vocab_size))
            token_ids[i] = -1;
        else if (sampling.temperatures[i] == 0)
            token_ids[i] = row.most_likely();
        else
            token_ids[i] = row.draw(sampling.temperatures[i], sampling.top_ks[i], sampling.top_ps[i], sampling.min_ps[i], sampling.noise[i]);
    });
}

void token_logprobs(const LogitRows& rows, const int64_t* token_ids, const Logprobs& logprobs, Isa isa, int num_threads) {
    if (logprobs.k < 0 || logprobs.k > rows.vocab_size) throw std::invalid_argument("k must be from 0 to the size of the vocabulary");
    for (int64_t i = 0; i < rows.num_rows; ++i)
        if (token_ids[i] < 0 || token_ids[i] >= rows.vocab_size) throw std::out_of_range("a token that is not in the vocabulary");
    for_each_row(rows, isa, num_threads, [&](Row& row, int64_t i) {
        const float* logits = rows.logits + i * rows.vocab_size;
        if (!row.read(logits)) return report_nothing(logprobs, i);
        const double log_total = row.log_total();
        logprobs.values[i] = static_cast<float>(logits[token_ids[i]] - log_total);
        logprobs.ranks[i] = row.rank(token_ids[i]);
        if (logprobs.k == 0) return;
        const auto& top = row.top(logprobs.k);
        for (int64_t j = 0; j < logprobs.k; ++j) {
            logprobs.top_ids[i * logprobs.k + j] = top[j].id;
            logprobs.top_values[i * logprobs.k + j] = static_cast<float>(top[j].logit - log_total);
        }
    });
}

}  // namespace loramux
