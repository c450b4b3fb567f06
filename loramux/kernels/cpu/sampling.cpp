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
constexpr float REACHES[] = {6.0f, 9.0f, 13.0f, WEIGHTLESS};
// Classes of logits by which a nucleus is narrowed down.
constexpr int NUM_CLASSES = 256;

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

int64_t total(const int64_t* weights, int64_t count) { return std::accumulate(weights, weights + count, int64_t{0}); }

// Kept by each thread, for a page touched first costs more than a row's pass over it.
struct Buffers {
    std::vector<float> maxima;   // of blocks
    std::vector<int64_t> spans;  // weights of spans
    std::vector<int32_t> ids;    // of the tokens kept, in order
    std::vector<float> kept;     // their logits
    std::vector<int64_t> weights;
    std::vector<float> best;
    std::vector<Weighted> nucleus;
    std::vector<Token> top;

    static Buffers& of_size(int64_t vocab_size) {
        static thread_local Buffers buffers;
        buffers.maxima.resize((vocab_size + SAMPLING_BLOCK - 1) / SAMPLING_BLOCK);
        buffers.spans.resize((vocab_size + SAMPLING_SPAN - 1) / SAMPLING_SPAN);
        buffers.ids.resize(vocab_size);
        buffers.kept.resize(vocab_size);
        buffers.weights.resize(vocab_size);
        return buffers;
    }
};

// A row of logits that has a finite peak and no NaN.
class Row {
   public:
    Row(const SamplingKernel& kernel, int64_t vocab_size)
        : kernel_(kernel), size_(vocab_size), buffers_(Buffers::of_size(vocab_size)), maxima_(buffers_.maxima), best_(buffers_.best),
          nucleus_(buffers_.nucleus), top_(buffers_.top), spans_(buffers_.spans.data()), num_spans_(buffers_.spans.size()),
          ids_(buffers_.ids.data()), kept_(buffers_.kept.data()), weights_(buffers_.weights.data()) {}

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

    int64_t draw(const SamplingRow& row) {
        weigh_at(row.temperature, row.min_p);
        const bool has_k = row.top_k > 0 && row.top_k < size_, has_p = row.top_p < 1;
        if (!has_k && !has_p) return draw_any(row.noise);
        if (has_k) keep_most_likely(row.top_k);
        if (has_k && has_p) keep_nucleus(wanted(total(weights_, num_kept_), row.top_p));
        if (!has_k) keep_nucleus_of_all(row.top_p);
        return draw_kept(row.noise);
    }

    // log of the sum of e^logit
    double log_total() {
        weigh_at(1.0f, 0.0f);
        kernel_.sum_spans(logits_, size_, weighing_, spans_);
        return peak_ + std::log(std::ldexp(static_cast<double>(total(spans_, num_spans_)), -40));
    }

    int64_t rank(int64_t token_id) const { return kernel_.count_above(logits_, size_, logits_[token_id]) + 1; }

    // The first k by `is_ahead`.
    const std::vector<Token>& top(int64_t k) {
        collect(least_of_best(k));
        top_.clear();
        for (int64_t i = 0; i < num_kept_; ++i) top_.push_back({kept_[i], ids_[i]});
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
        least_ = least;
        num_kept_ = kernel_.collect(logits_, size_, least, ids_, kept_);
    }

    void weigh_kept() { kernel_.weigh(kept_, num_kept_, weighing_, weights_); }

    void keep_most_likely(int64_t k) {
        collect(std::max(least_of_best(k), peak_ - WEIGHTLESS * temperature_));
        if (k < num_kept_) {
            best_.assign(kept_, kept_ + num_kept_);
            std::nth_element(best_.begin(), best_.begin() + (k - 1), best_.end(), std::greater<>());
            drop_below(best_[k - 1]);
        }
        weigh_kept();
    }

    void drop_below(float least) {
        least_ = least;
        int64_t count = 0;
        for (int64_t i = 0; i < num_kept_; ++i) {
            ids_[count] = ids_[i];
            kept_[count] = kept_[i];
            count += kept_[i] >= least;
        }
        num_kept_ = count;
    }

    void keep_nucleus_of_all(double top_p) {
        kernel_.sum_spans(logits_, size_, weighing_, spans_);
        const int64_t weight = wanted(total(spans_, num_spans_), top_p);
        for (float reach : REACHES) {
            collect(peak_ - reach * temperature_);
            weigh_kept();
            if (total(weights_, num_kept_) >= weight) break;
        }
        keep_nucleus(weight);
    }

    static int64_t wanted(int64_t weight, double top_p) {
        const int64_t part = static_cast<int64_t>(std::ceil(static_cast<double>(weight) * top_p));
        return std::clamp<int64_t>(part, 1, weight);
    }

    // Of the tokens kept, the most likely that reach the weight, and their equals.
    void keep_nucleus(int64_t weight) {
        const float least = least_reaching(weight);
        for (int64_t i = 0; i < num_kept_; ++i) weights_[i] = kept_[i] < least ? 0 : weights_[i];
    }

    // The logit of the token with which the weight is reached, the most likely first.
    float least_reaching(int64_t weight) {
        if (least_ >= peak_) return peak_;
        const float scale = (NUM_CLASSES - 1) / (peak_ - least_);
        const auto class_of = [&](float logit) { return static_cast<int>((peak_ - logit) * scale); };  // grows as logits fall
        int64_t sums[NUM_CLASSES + 1] = {};
        for (int64_t i = 0; i < num_kept_; ++i) sums[class_of(kept_[i])] += weights_[i];
        int chosen = 0;
        while (sums[chosen] < weight) weight -= sums[chosen++];
        nucleus_.clear();
        for (int64_t i = 0; i < num_kept_; ++i)
            if (class_of(kept_[i]) == chosen) nucleus_.push_back({kept_[i], weights_[i]});
        return least_of_nucleus(weight);
    }

    // The answer is always within [begin, end).
    float least_of_nucleus(int64_t weight) {
        auto begin = nucleus_.begin(), end = nucleus_.end();
        while (end - begin > 1) {
            const auto middle = begin + (end - begin) / 2;
            std::nth_element(begin, middle, end, is_likelier);
            int64_t ahead = 0;
            for (auto each = begin; each < middle; ++each) ahead += each->weight;
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
    static int64_t passing(const int64_t* weights, int64_t& target) {
        int64_t i = 0;
        while (target >= weights[i]) target -= weights[i++];
        return i;
    }

    int64_t draw_kept(double noise) {
        int64_t left = target(total(weights_, num_kept_), noise);
        return ids_[passing(weights_, left)];
    }

    int64_t draw_any(double noise) {
        kernel_.sum_spans(logits_, size_, weighing_, spans_);
        int64_t left = target(total(spans_, num_spans_), noise);
        const int64_t begin = passing(spans_, left) * SAMPLING_SPAN;
        kernel_.weigh(logits_ + begin, std::min(SAMPLING_SPAN, size_ - begin), weighing_, weights_);
        return begin + passing(weights_, left);
    }

    const SamplingKernel kernel_;
    const int64_t size_;
    const float* logits_ = nullptr;
    float peak_ = 0;
    float temperature_ = 0;
    Weighing weighing_{};
    Buffers& buffers_;
    std::vector<float>& maxima_;
    std::vector<float>& best_;
    std::vector<Weighted>& nucleus_;
    std::vector<Token>& top_;
    int64_t* const spans_;
    const int64_t num_spans_;
    int32_t* const ids_;
    float* const kept_;
    int64_t* const weights_;
    int64_t num_kept_ = 0;
    float least_ = 0;  // none of the tokens kept has less
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

std::vector<int64_t> choose_tokens(const LogitRows& rows, const std::vector<SamplingRow>& sampling, Isa isa, int num_threads) {
    if (static_cast<int64_t>(sampling.size()) != rows.num_rows) throw std::invalid_argument("as many rows of logits as are sampled");
    std::vector<int64_t> token_ids(rows.num_rows);
    for_each_row(rows, isa, num_threads, [&](Row& row, int64_t i) {
        if (!row.read(rows.logits + i * rows.vocab_size))
            token_ids[i] = -1;
        else if (sampling[i].temperature == 0)
            token_ids[i] = row.most_likely();
        else
            token_ids[i] = row.draw(sampling[i]);
    });
    return token_ids;
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
