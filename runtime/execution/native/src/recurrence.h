// Recurrent layers: short convolutions and gated delta nets, one token after the other in float32.
//
// A channel, and a column of a head's matrix, is computed in the same order with the same instructions wherever a
// sequence is cut. So a state has the same bits for any chunks, and after a replay of accepted guesses.
#pragma once

#include <vector>

#include "gemm.h"

namespace ramet {

enum class Recurrent : int64_t { kNone, kConv, kDelta };

// See ConvSpec and DeltaSpec in runtime/models/recurrence.py.
struct RecurrenceShape {
    Recurrent kind;
    int64_t channels;
    int64_t width;
    int64_t record;
    int64_t most_drafted;
    int64_t k_heads;
    int64_t v_heads;
    int64_t k_dim;
    int64_t v_dim;
    int64_t is_tiled;

    // Width of a row of outputs.
    int64_t outputs() const { return kind == Recurrent::kConv ? channels : v_heads * v_dim; }
    // Width of a row of projections: the record, then the gates of the outputs.
    int64_t columns() const { return kind == Recurrent::kNone ? 0 : record + outputs(); }
};

// Vectors and states of a layer; see Recurrent and DeltaNet in runtime/execution/mixers.
struct LayerState {
    const float* taps;      // [width, channels]; null: the layer is not recurrent
    const float* tap_bias;  // [channels]; null: none
    const float* rate;      // [v_heads]
    const float* dt_bias;   // [v_heads]
    const float* norm;      // [v_dim]
    float* tail;            // [slots, channels, width - 1]
    float* matrix;          // [slots, v_heads, k_dim, v_dim]
    float* records;         // [slots, most_drafted, record]
};

struct Save {
    int64_t row;
    int64_t slot;
};

// See StateRows in runtime/batch.py.
struct StateRows {
    int64_t first;
    int64_t stop;
    int64_t slot;
    int64_t target;
    int64_t draft;
    int64_t accepted;
    const Save* saves;  // in order
    int64_t num_saves;
};

class Recurrence {
  public:
    explicit Recurrence(const RecurrenceShape& shape) : shape_(shape), ld_(shape.channels + 2 * shape.v_heads) {}

    // Set the sequences of a step. One thread calls this before all threads call `run`.
    void plan(const StateRows* states, int64_t count, int64_t num_rows) {
        states_ = states, count_ = count;
        replayed_.clear();
        drafted_.assign(num_rows, -1);
        int64_t rows = num_rows;
        for (int64_t s = 0; s < count; ++s) {
            replayed_.push_back(rows);
            rows += states[s].accepted;
            for (int64_t i = 0; i < states[s].draft; ++i) {
                drafted_[states[s].stop - states[s].draft + i] = states[s].target * shape_.most_drafted + i;
            }
        }
        if (shape_.kind == Recurrent::kDelta) mixed_.reserve(rows * ld_);
    }

    // This thread's share of a layer, in phases of the team: outputs [rows, outputs()] of projections.
    void run(Team& team, const LayerState& layer, const float* given, int64_t ld_given, float* out, int64_t ld_out) {
        const int64_t blocks = shape_.kind == Recurrent::kConv ? (shape_.channels + kBlock - 1) / kBlock
                                                               : 2 * shape_.k_heads + shape_.v_heads;
        for (int64_t piece; (piece = team.take()) < count_ * blocks;) {
            mix(layer, piece / blocks, piece % blocks, given, ld_given, out, ld_out);
        }
        team.barrier();
        if (shape_.kind == Recurrent::kConv) return;
        const int64_t panels = (shape_.v_dim + kPanel - 1) / kPanel, parts = shape_.v_heads * panels;
        for (int64_t piece; (piece = team.take()) < count_ * parts;) {
            const int64_t head = piece % parts / panels, column = piece % panels * kPanel;
            advance(layer, piece / parts, head, column, out, ld_out);
        }
        team.barrier();
    }

    // Finish a row of outputs, and keep its record if it is a guess. `given`: the row of projections.
    void finish(const LayerState& layer, int64_t row, const float* given, float* out, float eps) const {
        if (drafted_[row] >= 0) std::copy_n(given, shape_.record, layer.records + drafted_[row] * shape_.record);
        if (shape_.kind == Recurrent::kConv) return;
        const float* gates = given + shape_.record;
        for (int64_t head = 0; head < shape_.v_heads; ++head, out += shape_.v_dim, gates += shape_.v_dim) {
            const float scale = 1 / std::sqrt(squares(out, shape_.v_dim) / float(shape_.v_dim) + eps);
            each_vector(shape_.v_dim, [&](int64_t i, int n) {
                const Vec normed = mul(mul(load(out + i, n), set1(scale)), load(layer.norm + i, n));
                store(out + i, mul(normed, silu(load(gates + i, n))), n);
            });
        }
    }

  private:
    static constexpr int64_t kBlock = 128;  // channels of a piece
    static constexpr int kSums = 4;

    // Call treat(index, number of lanes) for vectors of n floats.
    template <class Treat>
    [[gnu::always_inline]] static void each_vector(int64_t n, const Treat& treat) {
        for (int64_t i = 0; i < n; i += kLanes) treat(i, int(std::min<int64_t>(kLanes, n - i)));
    }

    static float squares(const float* x, int64_t n) {
        Vec sum = zero();
        each_vector(n, [&](int64_t i, int lanes) {
            const Vec some = load(x + i, lanes);
            sum = fma(some, some, sum);
        });
        return reduce_add(sum);
    }

    // Rows of a sequence: those of accepted guesses, then those of the step.
    int64_t size(const StateRows& rows) const { return rows.accepted + rows.stop - rows.first; }
    int64_t place(int64_t s, int64_t i) const {
        const StateRows& rows = states_[s];
        return i < rows.accepted ? replayed_[s] + i : rows.first + i - rows.accepted;
    }
    // Projections of a row.
    const float* inputs(const LayerState& layer, const StateRows& rows, int64_t i, const float* given,
                        int64_t ld) const {
        if (i < rows.accepted) return layer.records + (rows.slot * shape_.most_drafted + i) * shape_.record;
        return given + (rows.first + i - rows.accepted) * ld;
    }
    // Call keep(slot) for the slots that get the state after row i of a sequence, its target among them. `next`: the first save that is left.
    template <class Keep>
    void each_slot(const StateRows& rows, int64_t i, int64_t& next, const Keep& keep) const {
        for (; next < rows.num_saves && rows.saves[next].row - rows.first + rows.accepted == i; ++next) {
            keep(rows.saves[next].slot);
        }
        if (i == size(rows) - rows.draft - 1) keep(rows.target);
    }

    // Convolve a block of channels of a sequence. For delta nets, a block is a head of queries, keys or values.
    void mix(const LayerState& layer, int64_t s, int64_t block, const float* given, int64_t ld_given, float* out,
             int64_t ld_out) {
        const bool is_conv = shape_.kind == Recurrent::kConv, is_value = block >= 2 * shape_.k_heads;
        const int64_t keys = 2 * shape_.k_heads, head = block - keys;
        const int64_t from = is_conv ? block * kBlock
                             : is_value ? keys * shape_.k_dim + head * shape_.v_dim : block * shape_.k_dim;
        const int64_t count = is_conv ? std::min(kBlock, shape_.channels - from)
                              : is_value ? shape_.v_dim : shape_.k_dim;
        const StateRows& rows = states_[s];
        const int64_t keep = shape_.width - 1, total = size(rows), channels = shape_.channels;
        static thread_local Buffer<float> room;
        float* in = room.reserve((keep + total + 1) * count);
        const float* tail = layer.tail + (rows.slot * channels + from) * keep;
        for (int64_t c = 0; c < count; ++c) {
            for (int64_t i = 0; i < keep; ++i) in[i * count + c] = tail[c * keep + i];
        }
        int64_t next = 0;
        for (int64_t i = 0; i < total; ++i) {
            const float* x = inputs(layer, rows, i, given, ld_given);
            float *last = in + (keep + i) * count, *sum = in + (keep + total) * count;
            for (int64_t c = 0; c < count; ++c) last[c] = is_conv ? x[from + c] * x[channels + from + c] : x[from + c];
            each_vector(count, [&](int64_t c, int n) {
                Vec total = layer.tap_bias ? load(layer.tap_bias + from + c, n) : zero();
                for (int64_t j = 0; j <= keep; ++j) {
                    total = fma(load(in + (i + j) * count + c, n), load(layer.taps + j * channels + from + c, n), total);
                }
                store(sum + c, is_conv ? total : silu(total), n);
            });
            each_slot(rows, i, next, [&](int64_t slot) {
                float* to = layer.tail + (slot * channels + from) * keep;
                for (int64_t c = 0; c < count; ++c) {
                    for (int64_t j = 0; j < keep; ++j) to[c * keep + j] = in[(i + 1 + j) * count + c];
                }
            });
            if (is_conv) {
                if (i < rows.accepted) continue;
                float* to = out + place(s, i) * ld_out + from;
                for (int64_t c = 0; c < count; ++c) to[c] = sum[c] * x[2 * channels + from + c];
                continue;
            }
            float *to = mixed_.data() + place(s, i) * ld_, scale = 1;
            if (is_value) {
                set_gates(layer, head, x + channels, to + channels);
            } else {
                scale = 1 / std::sqrt(squares(sum, count) + 1e-6f);
                if (block < shape_.k_heads) scale *= 1 / std::sqrt(float(shape_.k_dim));
            }
            for (int64_t c = 0; c < count; ++c) to[from + c] = sum[c] * scale;
        }
    }

    // Decay and beta of a head, of their projections [2, v_heads].
    void set_gates(const LayerState& layer, int64_t head, const float* given, float* out) const {
        const float x = given[head] + layer.dt_bias[head], softplus = x > 20 ? x : std::log1p(std::exp(x));
        out[head] = std::exp(-layer.rate[head] * softplus);
        out[shape_.v_heads + head] = 1 / (1 + std::exp(-given[shape_.v_heads + head]));
    }

    // Advance kPanel columns of a head's matrix through the rows of a sequence.
    void advance(const LayerState& layer, int64_t s, int64_t head, int64_t column, float* out, int64_t ld_out) {
        const StateRows& rows = states_[s];
        const int64_t k_dim = shape_.k_dim, v_dim = shape_.v_dim, total = size(rows);
        const int64_t k_head = shape_.is_tiled ? head % shape_.k_heads : head * shape_.k_heads / shape_.v_heads;
        const int first = int(std::min<int64_t>(kLanes, v_dim - column));
        const int second = int(std::clamp<int64_t>(v_dim - column - kLanes, 0, kLanes));
        static thread_local Buffer<float> room;
        float* matrix = room.reserve(k_dim * kPanel);
        auto stored = [&](int64_t slot) { return layer.matrix + (slot * shape_.v_heads + head) * k_dim * v_dim + column; };
        const float* from = stored(rows.slot);
        for (int64_t i = 0; i < k_dim; ++i) {
            store(matrix + i * kPanel, load(from + i * v_dim, first));
            store(matrix + i * kPanel + kLanes, second ? load(from + i * v_dim + kLanes, second) : zero());
        }
        int64_t next = 0;
        for (int64_t t = 0; t < total; ++t) {
            const int64_t row = place(s, t);
            const float* q = mixed_.data() + row * ld_ + k_head * k_dim;
            const float* k = q + shape_.k_heads * k_dim;
            const float* v = mixed_.data() + row * ld_ + 2 * shape_.k_heads * k_dim + head * v_dim + column;
            const float* gates = mixed_.data() + row * ld_ + shape_.channels + head;
            Vec o0 = zero(), o1 = zero();
            step(matrix, q, k, v, gates[0], gates[shape_.v_heads], first, second, o0, o1);
            if (t >= rows.accepted) {
                float* to = out + row * ld_out + head * v_dim + column;
                store(to, o0, first);
                if (second) store(to + kLanes, o1, second);
            }
            each_slot(rows, t, next, [&](int64_t slot) {
                float* to = stored(slot);
                for (int64_t i = 0; i < k_dim; ++i) {
                    store(to + i * v_dim, load(matrix + i * kPanel), first);
                    if (second) store(to + i * v_dim + kLanes, load(matrix + i * kPanel + kLanes), second);
                }
            });
        }
    }

    // Call treat(row, which sum) for all rows of a matrix. Separate sums hide the latency of additions.
    template <class Treat>
    [[gnu::always_inline]] void each_matrix_row(const Treat& treat) const {
        int64_t i = 0;
        for (; i + kSums <= shape_.k_dim; i += kSums) {
#pragma GCC unroll 4
            for (int j = 0; j < kSums; ++j) treat(i + j, j);
        }
        for (; i < shape_.k_dim; ++i) treat(i, 0);
    }

    // One token: the matrix decays, gets what it lacks to return v for k, and answers q.
    [[gnu::always_inline]] void step(float* matrix, const float* q, const float* k, const float* v, float decay,
                                     float beta, int first, int second, Vec& o0, Vec& o1) const {
        Tile<kSums> known, found;
        clear<kSums>(known), clear<kSums>(found);
        each_matrix_row([&](int64_t i, int j) __attribute__((always_inline)) {
            const Vec key = set1(k[i]);
            known[j][0] = fma(key, load(matrix + i * kPanel), known[j][0]);
            known[j][1] = fma(key, load(matrix + i * kPanel + kLanes), known[j][1]);
        });
        const Vec keeps = set1(decay), rate = set1(beta);
        const Vec v0 = load(v, first), v1 = second ? load(v + kLanes, second) : zero();
        const Vec lacks0 = mul(sub(v0, mul(keeps, sum_of(known, 0))), rate);
        const Vec lacks1 = mul(sub(v1, mul(keeps, sum_of(known, 1))), rate);
        each_matrix_row([&](int64_t i, int j) __attribute__((always_inline)) {
            float* row = matrix + i * kPanel;
            const Vec key = set1(k[i]), query = set1(q[i]);
            const Vec row0 = fma(key, lacks0, mul(keeps, load(row)));
            const Vec row1 = fma(key, lacks1, mul(keeps, load(row + kLanes)));
            store(row, row0), store(row + kLanes, row1);
            found[j][0] = fma(query, row0, found[j][0]);
            found[j][1] = fma(query, row1, found[j][1]);
        });
        o0 = sum_of(found, 0), o1 = sum_of(found, 1);
    }

    static Vec sum_of(const Tile<4>& sums, int half) {
        return add(add(sums[0][half], sums[1][half]), add(sums[2][half], sums[3][half]));
    }

    const RecurrenceShape shape_;
    const int64_t ld_;
    const StateRows* states_ = nullptr;
    int64_t count_ = 0;
    std::vector<int64_t> replayed_;  // by sequence: the row of mixed_ of its first accepted guess
    std::vector<int64_t> drafted_;   // by row: where its record goes; -1: it is no guess
    Buffer<float> mixed_;            // [rows and replayed rows, channels + 2 v_heads]: q, k, v, decay, beta
};

}  // namespace ramet
