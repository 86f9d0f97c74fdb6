// Mixtures of experts: a router chooses experts for each row, and their outputs are summed.
#pragma once

#include <limits>
#include <numeric>
#include <vector>

#include "gemm.h"

namespace ramet {

// The experts of a layer; see ExpertSpec in runtime/models/experts.py.
struct Experts {
    Matrix router;
    Matrix shared_gate;     // one column, whose sigmoid weighs the shared expert; without columns, its weight is 1
    const Matrix* gate_up;  // of each expert, the shared one last; paired, if there is no limit
    const Matrix* down;
    const float* bias;  // [count], added to scores only for the choice; null: none
    int64_t count;
    int64_t chosen;
    int64_t has_shared;
    int64_t inner;  // columns of the widest expert
    int64_t groups;
    int64_t chosen_groups;
    int64_t best;
    int64_t is_sigmoid;
    int64_t is_normalized;
    float scale;
    float limit;  // 0: none
    float alpha;
};

// Computes the experts of a layer, one after the other, for all rows that chose them. A row's result does not depend on
// the other rows.
class Mixture {
  public:
    // Make room for `m` rows [m, hidden].
    void reserve(const Experts& experts, int64_t hidden, int64_t m) {
        ld_ = stride(hidden), ld_inner_ = stride(experts.inner), ld_gates_ = stride(2 * experts.inner);
        slots_ = experts.chosen + experts.has_shared;
        scores_.reserve(m * experts.count);
        ranks_.reserve(m * experts.count);
        shared_.reserve(m);
        chosen_.reserve(m * slots_);
        weights_.reserve(m * slots_);
        order_.reserve(m * slots_);
        begins_.reserve(experts.count + 2);
        gathered_.reserve(m * ld_);
        out_.reserve(m * ld_);
        mixed_.reserve(m * ld_);
        inner_.reserve(m * ld_inner_);
        if (experts.limit != 0) gates_.reserve(m * ld_gates_);
    }

    // This thread's share: x [m, hidden] += outputs for `in` [m, hidden], both with a stride of `ld`. Ends its phases.
    void run(Team& team, const Experts& experts, const float* in, float* x, int64_t ld, int64_t hidden, int64_t m,
             Buffer<uint32_t>& room) {
        auto multiply = [&](const float* a, int64_t lda, int64_t rows, const Matrix& w, float* c, int64_t ldc,
                            int64_t columns, Into into = Into::kStore) {
            ramet::multiply(team, Product{a, lda, rows, &w, c, ldc, columns, into}, room);
            team.barrier();
        };
        multiply(in, ld, m, experts.router, scores_.data(), experts.count, experts.count);
        if (experts.shared_gate.n) multiply(in, ld, m, experts.shared_gate, shared_.data(), 1, 1);
        each(team, m, [&](int64_t row) {
            choose(experts, row);
            std::fill_n(mixed_.data() + row * ld_, hidden, 0.0f);
        });
        if (team.take() == 0) sort(experts, m);
        team.barrier();
        for (int64_t e = 0; e < experts.count + experts.has_shared; ++e) {
            const int64_t* slots = order_.data() + begins_.data()[e];
            const int64_t rows = begins_.data()[e + 1] - begins_.data()[e], inner = experts.gate_up[e].n / 2;
            if (rows == 0) continue;
            const float* a = in + slots[0] / slots_ * ld;
            if (rows > 1) {
                each(team, rows, [&](int64_t i) {
                    std::copy_n(in + slots[i] / slots_ * ld, hidden, gathered_.data() + i * ld_);
                });
                a = gathered_.data();
            }
            const int64_t lda = rows > 1 ? ld_ : ld;
            if (experts.gate_up[e].is_paired) {
                multiply(a, lda, rows, experts.gate_up[e], inner_.data(), ld_inner_, inner, Into::kSilu);
            } else {
                multiply(a, lda, rows, experts.gate_up[e], gates_.data(), ld_gates_, 2 * inner);
                each(team, rows, [&](int64_t i) { close_gates(experts, inner, i); });
            }
            multiply(inner_.data(), ld_inner_, rows, experts.down[e], out_.data(), ld_, hidden);
            each(team, rows, [&](int64_t i) {
                add(out_.data() + i * ld_, weights_.data()[slots[i]], hidden, mixed_.data() + slots[i] / slots_ * ld_);
            });
        }
        each(team, m, [&](int64_t row) { add(mixed_.data() + row * ld_, 1, hidden, x + row * ld); });
    }

  private:
    static constexpr float kLeast = std::numeric_limits<float>::lowest();

    // An odd number of cache lines, so that the rows of a tile use different sets of the cache.
    static int64_t stride(int64_t n) { return round_up(n, 2 * kPanel) + 16; }

    template <class Treat>
    static void each(Team& team, int64_t count, const Treat& treat) {
        for (int64_t i; (i = team.take()) < count;) treat(i);
        team.barrier();
    }

    static void add(const float* from, float weight, int64_t n, float* to) {
        for (int64_t i = 0; i < n; ++i) to[i] += weight * from[i];
    }

    // Choose a row's experts from its scores.
    void choose(const Experts& experts, int64_t row) {
        const int64_t n = experts.count;
        float *scores = scores_.data() + row * n, *ranks = ranks_.data() + row * n;
        float* weights = weights_.data() + row * slots_;
        int64_t* chosen = chosen_.data() + row * slots_;
        const float most = experts.is_sigmoid ? 0 : *std::max_element(scores, scores + n);
        for (int64_t e = 0; e < n; ++e) {
            scores[e] = experts.is_sigmoid ? sigmoid(scores[e]) : std::exp(scores[e] - most);
        }
        const float total = experts.is_sigmoid ? 1 : std::accumulate(scores, scores + n, 0.0f);
        for (int64_t e = 0; e < n; ++e) {
            scores[e] /= total;
            // NaN becomes kLeast, which is above the mark of a chosen expert: a row never chooses one twice.
            ranks[e] = std::max(kLeast, scores[e] + (experts.bias ? experts.bias[e] : 0));
        }
        if (experts.groups > 1) keep_groups(experts, ranks);
        float sum = 0;
        for (int64_t i = 0; i < experts.chosen; ++i) {
            chosen[i] = std::max_element(ranks, ranks + n) - ranks;
            ranks[chosen[i]] = -INFINITY;
            sum += weights[i] = scores[chosen[i]];
        }
        // The sum is 0 if all sigmoids underflow.
        const float factor = experts.scale / (experts.is_normalized ? sum + 1e-20f : 1);
        for (int64_t i = 0; i < experts.chosen; ++i) weights[i] *= factor;
        if (experts.has_shared) {
            chosen[experts.chosen] = n;
            weights[experts.chosen] = experts.shared_gate.n ? sigmoid(shared_.data()[row]) : 1;
        }
    }

    // Leave only the ranks of the groups whose best ranks have the largest sums.
    static void keep_groups(const Experts& experts, float* ranks) {
        static thread_local std::vector<float> sums, sorted;
        const int64_t size = experts.count / experts.groups, best = std::min(experts.best, size);
        sums.clear();
        for (int64_t g = 0; g < experts.groups; ++g) {
            sorted.assign(ranks + g * size, ranks + (g + 1) * size);
            std::partial_sort(sorted.begin(), sorted.begin() + best, sorted.end(), std::greater<float>());
            sums.push_back(std::accumulate(sorted.begin(), sorted.begin() + best, 0.0f));
        }
        for (int64_t dropped = experts.groups - experts.chosen_groups; dropped > 0; --dropped) {
            // Of equal groups, the first stay.
            const int64_t least = experts.groups - 1 - (std::min_element(sums.rbegin(), sums.rend()) - sums.rbegin());
            sums[least] = INFINITY;
            std::fill_n(ranks + least * size, size, kLeast);
        }
    }

    static float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

    // Sort all rows' choices by expert, with a row's number and the place of its choice as one number.
    void sort(const Experts& experts, int64_t m) {
        const int64_t count = experts.count + experts.has_shared, *chosen = chosen_.data();
        int64_t *begins = begins_.data(), *order = order_.data();
        std::fill_n(begins, count + 1, 0);
        for (int64_t i = 0; i < m * slots_; ++i) ++begins[chosen[i] + 1];
        std::partial_sum(begins, begins + count + 1, begins);
        for (int64_t i = 0; i < m * slots_; ++i) order[begins[chosen[i]]++] = i;
        std::copy_backward(begins, begins + count, begins + count + 1);
        begins[0] = 0;
    }

    // The bounded gate of gpt-oss.
    void close_gates(const Experts& experts, int64_t inner, int64_t i) {
        const float *gate = gates_.data() + i * ld_gates_, *up = gate + inner;
        const Vec limit = set1(experts.limit), alpha = set1(experts.alpha);
        for (int64_t at = 0; at < inner; at += kLanes) {
            const int n = int(std::min<int64_t>(kLanes, inner - at));
            const Vec bounded = min(load(gate + at, n), limit);
            const Vec linear = min(max(load(up + at, n), sub(zero(), limit)), limit);
            const Vec closed = mul(gated(bounded, mul(bounded, alpha)), ramet::add(linear, set1(1)));
            store(inner_.data() + i * ld_inner_ + at, closed, n);
        }
    }

    int64_t ld_ = 0, ld_inner_ = 0, ld_gates_ = 0;
    int64_t slots_ = 0;  // experts of a row
    Buffer<float> scores_, ranks_, shared_, weights_, gathered_, gates_, inner_, out_, mixed_;
    Buffer<int64_t> chosen_, order_, begins_;  // begins_: of each expert in order_
};

}  // namespace ramet
