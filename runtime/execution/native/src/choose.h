// The choice of a token from a row of logits, and log-probabilities, as runtime/sampling/choosing.py has them with torch.
#pragma once

#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "argmax.h"
#include "buffer.h"

namespace ramet {

constexpr int64_t kBlock = 64;  // _BLOCK there
constexpr float kStep = 64;     // the search for the likeliest tokens lowers its bound by this factor

// How to choose a token from row `row`.
struct Choice {
    int64_t row, top_k;         // 0: all
    int64_t is_drawn, stream;   // if not drawn, take the highest logit
    int64_t num_biased, num_seen, num_barred;
    const int64_t* biased;
    const float* bias;        // [num_biased]
    const int64_t* seen;      // [num_seen], tokens of prompt and output
    const int64_t* counts;    // [n], 1 + how often these were generated
    const int64_t* barred;    // [num_barred]
    const uint8_t* allowed;   // bits [n]; null: all
    float divisor, top_p, min_p, repetition, frequency, presence;

    bool changes() const { return num_biased > 0 || num_seen > 0 || num_barred > 0 || allowed != nullptr; }
    bool filters() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

struct Token {
    uint64_t key;  // the larger, the earlier a token comes: by its value, of equal values by lower ids
    float weight;

    Token(float value, int64_t id, float weight) : weight(weight) {
        const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 equals 0
        key = uint64_t(bits >> 31 ? ~bits : bits | 1u << 31) << 32 | uint32_t(~id);
    }
    int64_t id() const { return uint32_t(~key); }
    bool operator>(const Token& other) const { return key > other.key; }
};
using Tokens = std::vector<Token>;

inline double weight_of(Tokens::const_iterator first, Tokens::const_iterator last) {
    return std::accumulate(first, last, 0.0, [](double sum, const Token& token) { return sum + token.weight; });
}

// Keep the first `count`, in any order.
inline void keep_first(Tokens& tokens, int64_t count) {
    if (count >= int64_t(tokens.size())) return;
    std::nth_element(tokens.begin(), tokens.begin() + count, tokens.end(), std::greater<>());
    tokens.erase(tokens.begin() + count, tokens.end());
}

// Keep the fewest first tokens whose weights reach `weight`, in any order.
inline void keep_weight(Tokens& tokens, double weight) {
    auto first = tokens.begin(), last = tokens.end();
    while (last - first > 1) {
        const auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last, std::greater<>());
        const double upper = weight_of(first, middle);
        if (upper >= weight) {
            last = middle;
        } else {
            weight -= upper, first = middle;
        }
    }
    tokens.erase(weight > 0 ? last : first, tokens.end());
}

// Number i of a stream of uniform numbers between 0 and 1: SplitMix64 (Steele et al., 2014).
inline double uniform(int64_t stream, int64_t i) {
    uint64_t z = uint64_t(stream) + uint64_t(i + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (double((z ^ z >> 31) >> 12) + 0.5) * 0x1p-52;
}

// The index of the largest weight / noise; the exponential noise starts at number `first` of the stream.
inline int64_t win_race(const float* weights, int64_t n, int64_t stream, int64_t first) {
    int64_t best = 0;
    double most = -1;
    for (int64_t i = 0; i < n; ++i) {
        const double share = uniform(stream, first + i);
        if (weights[i] <= most * share) continue;  // the noise is at least `share`, so few logarithms are computed
        const double value = weights[i] / -std::log1p(-share);
        if (value > most) most = value, best = i;
    }
    return best;
}

// A row of logits in blocks: weights e^((x - top) / divisor), and their sum by block.
class Row {
  public:
    // False: the logits are not finite, or a choice leaves none.
    bool set(const float* x, int64_t n, const Choice* choice = nullptr) {
        x_ = x, n_ = n;
        best_ = ramet::argmax(x_, n);
        if (std::isfinite(x_[best_]) && choice != nullptr && choice->changes()) {
            change(*choice);
            best_ = ramet::argmax(x_, n);
        }
        return std::isfinite(x_[best_]);
    }

    int64_t best() const { return best_; }

    int64_t draw(const Choice& choice) {
        const int64_t blocks = weigh(choice.divisor);
        alignas(64) float weights[kBlock] = {};
        if (choice.filters()) {
            filter(choice);
            std::fill_n(sums_.data(), blocks, 0.0f);
            for (const Token& token : tokens_) sums_.data()[token.id() / kBlock] += token.weight;
        }
        const int64_t block = win_race(sums_.data(), blocks, choice.stream, 0);
        if (choice.filters()) {
            for (const Token& token : tokens_) {
                if (token.id() / kBlock == block) weights[token.id() % kBlock] = token.weight;
            }
        } else {
            weigh_block(block, weights);
        }
        return block * kBlock + win_race(weights, kBlock, choice.stream, blocks);
    }

    // Log-probabilities of `token` and of the `top` likeliest tokens [top].
    void measure(int64_t token, int64_t top, float* chosen, int64_t* ids, float* values) {
        weigh(1);
        const float shift = x_[best_] + float(std::log(total_));
        *chosen = x_[token] - shift;
        for (float cut = 1 / kStep;; cut /= kStep) {
            const bool all = cut < kLeast;
            gather(all ? 0 : cut / 2, all ? kMinusInfinity : x_[best_] + std::log(cut), [&](int64_t b, float* out) {
                std::fill(std::copy_n(x_ + b * kBlock, size(b), out), out + kBlock, kMinusInfinity);
            });
            if (all || int64_t(tokens_.size()) >= std::min(top, n_)) break;
        }
        keep_first(tokens_, top);
        std::sort(tokens_.begin(), tokens_.end(), std::greater<>());
        for (int64_t i = 0; i < int64_t(tokens_.size()); ++i) ids[i] = tokens_[i].id(), values[i] = tokens_[i].weight - shift;
    }

  private:
    static constexpr float kLeast = 1e-37f;  // weights are at least 2^-125, or 0

    int64_t size(int64_t block) const { return std::min(kBlock, n_ - block * kBlock); }

    // Copy the logits, with bias, penalties and masks.
    void change(const Choice& choice) {
        float* y = changed_.reserve(n_);
        if (choice.allowed == nullptr) {
            std::copy_n(x_, n_, y);
        } else {
            int64_t i = 0;
            for (; i + kLanes <= n_; i += kLanes) {
                store(y + i, select(choice.allowed + i / 8, load(x_ + i), set1(kMinusInfinity)));
            }
            for (; i < n_; ++i) y[i] = choice.allowed[i / 8] >> i % 8 & 1 ? x_[i] : kMinusInfinity;
        }
        for (int64_t i = 0; i < choice.num_biased; ++i) y[choice.biased[i]] += choice.bias[i];
        for (int64_t i = 0; i < choice.num_seen; ++i) {
            float& value = y[choice.seen[i]];
            const float count = float(choice.counts[choice.seen[i]] - 1);
            value = value > 0 ? value / choice.repetition : value * choice.repetition;
            value -= choice.frequency * count;
            value -= count > 0 ? choice.presence : 0;
        }
        for (int64_t i = 0; i < choice.num_barred; ++i) y[choice.barred[i]] = kMinusInfinity;
        x_ = y;
    }

    // Weigh all blocks; returns their number.
    int64_t weigh(float divisor) {
        top_ = set1(x_[best_]), factor_ = set1(kLog2E / divisor), total_ = 0;
        const int64_t blocks = (n_ + kBlock - 1) / kBlock;
        float* sums = sums_.reserve(blocks);
        alignas(64) float weights[kBlock];
        for (int64_t b = 0; b < blocks; ++b) total_ += sums[b] = weigh_block(b, weights);
        return blocks;
    }

    // weights [kBlock] of a block, 0 behind the last token. Returns their sum.
    float weigh_block(int64_t block, float* weights) const {
        const float* x = x_ + block * kBlock;
        alignas(64) float last[kBlock];
        if (size(block) < kBlock) {
            std::fill(std::copy_n(x, size(block), last), last + kBlock, kMinusInfinity);
            x = last;
        }
        Vec sum = zero();
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            const Vec weight = exp2(mul(sub(load(x + i), top_), factor_), zero());
            sum = add(sum, weight);
            store(weights + i, weight);
        }
        return reduce_add(sum);
    }

    // Make `tokens_` those whose value is at least `least`, in blocks whose sum is at least `cut`. `get` writes a block's
    // values.
    template <class Get>
    void gather(float cut, float least, const Get& get) {
        alignas(64) float values[kBlock];
        tokens_.clear();
        for (int64_t b = 0; b * kBlock < n_; ++b) {
            if (sums_.data()[b] < cut) continue;
            get(b, values);
            for (int64_t i = 0; i < size(b); i += kLanes) {
                for (uint32_t found = at_least(load(values + i), set1(least)); found != 0; found &= found - 1) {
                    const int64_t at = i + std::countr_zero(found);
                    if (at < size(b)) tokens_.emplace_back(values[at], b * kBlock + at, values[at]);
                }
            }
        }
    }

    // Make `tokens_` those that top-k, then top-p and min-p keep.
    void filter(const Choice& choice) {
        const bool counts = choice.top_k > 0 && choice.top_k < n_;
        float least = kLeast;
        if (!counts) {
            // Tokens below half of the mean dropped weight do not matter to top-p.
            least = std::max({least, choice.min_p, float((1 - choice.top_p) / 2 * total_ / double(n_))});
        }
        const bool searches = counts || choice.top_p < 1;
        for (float cut = searches ? std::max(1 / kStep, least) : least;; cut = std::max(cut / kStep, least)) {
            gather(cut, cut, [&](int64_t b, float* out) { weigh_block(b, out); });
            if (cut <= least) break;
            if (counts ? int64_t(tokens_.size()) >= choice.top_k : weight() >= choice.top_p * total_) break;
        }
        if (counts) keep_first(tokens_, choice.top_k);
        if (choice.top_p < 1) keep_weight(tokens_, choice.top_p * (counts ? weight() : total_));
        if (choice.min_p > 0) {
            float most = 0;
            for (const Token& token : tokens_) most = std::max(most, token.weight);
            std::erase_if(tokens_, [&](const Token& token) { return token.weight < choice.min_p * most; });
        }
    }

    double weight() const { return weight_of(tokens_.begin(), tokens_.end()); }

    const float* x_ = nullptr;
    int64_t n_ = 0, best_ = 0;
    Vec top_, factor_;
    double total_ = 0;
    Buffer<float> changed_, sums_;
    Tokens tokens_;
};

// Each thread takes one choice after the other. `out`: -1 where logits are not finite, or none is left.
inline void choose(Team& team, const float* rows, int64_t n, const Choice* choices, int64_t num_choices, int64_t* out) {
    team.run([&](int) {
        static thread_local Row row;
        for (int64_t i; (i = team.take()) < num_choices;) {
            const Choice& choice = choices[i];
            const bool is_sound = row.set(rows + choice.row * n, n, &choice);
            out[i] = !is_sound ? -1 : choice.is_drawn ? row.draw(choice) : row.best();
        }
    });
}

// Log-probabilities of `tokens` in the rows `index`, each [count], and of the `top` likeliest ones, [count, top].
inline void measure(Team& team, const float* rows, int64_t n, const int64_t* index, const int64_t* tokens,
                    int64_t count, int64_t top, float* chosen, int64_t* ids, float* values) {
    team.run([&](int) {
        static thread_local Row row;
        for (int64_t i; (i = team.take()) < count;) {
            if (!row.set(rows + index[i] * n, n)) continue;
            row.measure(tokens[i], top, chosen + i, ids + i * top, values + i * top);
        }
    });
}

}  // namespace ramet
