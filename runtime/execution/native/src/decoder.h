// The decoder stack: one call computes a step, and all threads work on each phase of a layer.
#pragma once

#include "attention.h"

namespace ramet {

struct Layer {
    const float* input_norm;  // [hidden]
    const float* post_norm;   // [hidden]
    const float* q_norm;      // [dim]; null: no norm
    const float* k_norm;      // [dim]
    const float* o_norm;      // [hidden], normalises the product before the residual is added; null: no norm
    const float* down_norm;   // [hidden], likewise
    Matrix qkv[3];            // side by side, as their storage may differ; unused ones have no columns
    Matrix o;
    Matrix gate_up;  // paired; without columns, the layer ends after its attention
    Matrix down;
    LayerKV kv;
};

// The update b (a x) that a low-rank adapter adds to a product. Without data, nothing is added.
struct LowRank {
    Matrix a;
    Matrix b;
};

// See FusedAdapter in runtime/execution/adapters.py.
struct AdapterLayer {
    LowRank qkv;
    LowRank o;
    LowRank gate_up;  // b is paired
    LowRank down;
};

// Rows of a group that have an adapter.
struct Adapted {
    const AdapterLayer* layers;
    int64_t most_rank;
    int64_t first;
    int64_t stop;
};

struct Model {
    int64_t hidden;
    int64_t inner;
    int64_t vocab;
    int64_t num_layers;
    float eps;
    float embedding_scale;
    Into gate;
    Shape shape;
    const Layer* layers;
    const float* norm;  // [hidden]
    Matrix head;
    Matrix table;           // embeddings; equal to the head if they are tied
    const void* embedding;  // [vocab, hidden], used instead of the table; null: the table is used
    int64_t embedding_is_bf16;
};

// See HiddenRows in runtime/batch.py.
struct HiddenRows {
    const int64_t* rows;
    int64_t num_rows;
    float* states;  // [num_rows, hidden]
};

// See LayerGroup in runtime/batch.py.
struct Group {
    int64_t first_layer;
    int64_t last_layer;  // exclusive
    const int64_t* rows;  // null: all
    int64_t num_rows;
    const int64_t* kv_write;  // [num_rows]
    const float* cosine;      // [num_rows, dim / 2]
    const float* sine;
    const Span* spans;
    const Edge* edges;
    int64_t num_edges;
    const HiddenRows* load;
    int64_t num_load;
    const HiddenRows* save;
    int64_t num_save;
    const Adapted* adapted;
    int64_t num_adapted;
};

struct Step {
    const int64_t* tokens;
    int64_t num_rows;
    const Group* groups;
    int64_t num_groups;
    const int64_t* logits_rows;
    int64_t num_logits;
    float* logits;  // [num_logits, vocab]
};

// Computes queries, keys and values of a layer for given input states.
struct Projection {
    int64_t layer;
    int64_t num_rows;
    const float* states;  // [num_rows, hidden]
    const float* cosine;  // [num_rows, dim / 2]
    const float* sine;
    float* out;  // [num_rows, heads + 2 kv_heads, dim], queries and keys rotated
};

class Decoder {
  public:
    Decoder(const Model& model, Team& team)
        : model_(model), team_(team),
          pairs_(kMultipliesPairs && is_bf16(model)), attention_(model.shape, pairs_),
          scratch_(new Scratch[team.size()]) {
        const Shape& shape = model.shape;
        // An odd number of cache lines, so that the rows of a tile use different sets of the cache.
        auto stride = [](int64_t n) { return round_up(n, kPanel) + (round_up(n, kPanel) / 16 % 2 ? 0 : 16); };
        ld_hidden_ = stride(model.hidden);
        ld_qkv_ = stride((shape.heads + 2 * shape.kv_heads) * shape.dim);
        ld_attention_ = stride(shape.heads * shape.dim);
        ld_inner_ = stride(model.inner);
        ld_gates_ = stride(2 * round_up(model.inner, kLanes));
    }

    void forward(const Step& step) {
        float* x = hidden_.reserve(step.num_rows * ld_hidden_);
        int64_t most = std::max(step.num_rows, step.num_logits);
        normed_.reserve(most * ld_hidden_);
        qkv_.reserve(step.num_rows * ld_qkv_);
        attended_.reserve(step.num_rows * ld_attention_);
        inner_.reserve(step.num_rows * ld_inner_);
        team_.run([&](int thread) { embed(step, x, thread); });
        for (int64_t g = 0; g < step.num_groups; ++g) {
            const Group& group = step.groups[g];
            attention_.plan(group.spans, group.edges, group.num_edges, group.num_rows, team_.size());
            for (int64_t i = 0; i < group.num_load; ++i) put_states(group.load[i], x);
            if (group.rows != nullptr) {
                alive_.reserve(group.num_rows * ld_hidden_);
                copy_rows(x, group.rows, alive_.data(), nullptr, group.num_rows);
            }
            float* rows = group.rows == nullptr ? x : alive_.data();
            if (group.num_adapted) gates_.reserve(group.num_rows * ld_gates_);
            for (int64_t i = 0; i < group.num_adapted; ++i) {
                low_rank_.reserve(group.num_rows * round_up(group.adapted[i].most_rank, kPanel));
            }
            const bool alone = pairs_ && !group.num_adapted && group.num_rows >= kAlone * team_.size();
            team_.run([&](int thread) {
                Worker worker = {{team_, alone}, scratch_[thread], 0, group.num_rows};
                if (alone) {
                    worker.begin = thread * group.num_rows / team_.size();
                    worker.end = (thread + 1) * group.num_rows / team_.size();
                }
                for (int64_t i = group.first_layer; i < group.last_layer; ++i) run_layer(i, group, rows, worker);
            });
            if (group.rows != nullptr) copy_rows(alive_.data(), nullptr, x, group.rows, group.num_rows);
            for (int64_t i = 0; i < group.num_save; ++i) take_states(group.save[i], x);
        }
        team_.run([&](int thread) {
            Worker worker = {{team_, false}, scratch_[thread], 0, step.num_logits};
            normalise(worker, x, step.logits_rows, model_.norm);
            multiply(worker, {normed_.data(), ld_hidden_, step.num_logits, &model_.head, step.logits, model_.vocab,
                              model_.vocab, Into::kStore, pairs_});
        });
    }

    void project(const Projection& wanted) {
        const Layer& layer = model_.layers[wanted.layer];
        const Shape& shape = model_.shape;
        const int64_t m = wanted.num_rows, width = (shape.heads + 2 * shape.kv_heads) * shape.dim;
        normed_.reserve(m * ld_hidden_);
        qkv_.reserve(m * ld_qkv_);
        team_.run([&](int thread) {
            Worker worker = {{team_, false}, scratch_[thread], 0, m};
            each_row(worker, [&](int64_t row) {
                normalise_row(wanted.states + row * model_.hidden, layer.input_norm, model_.hidden,
                              normed_.data() + row * ld_hidden_);
            });
            multiply_qkv(worker, layer, 0, m, false);
            each_row(worker, [&](int64_t row) {
                rotate(layer, wanted.cosine, wanted.sine, row);
                std::copy_n(qkv_.data() + row * ld_qkv_, width, wanted.out + row * width);
            });
        });
    }

  private:
    static bool is_bf16(const Model& model) {
        bool all = model.head.storage == Storage::kBfloat16;
        for (int64_t i = 0; i < model.num_layers; ++i) {
            const Layer& layer = model.layers[i];
            for (const Matrix* w : {layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
                all = all && (w->n == 0 || w->storage == Storage::kBfloat16);
            }
        }
        return all;
    }

    struct Scratch {
        Attention::Scratch attention;
        Buffer<uint32_t> product;
    };

    // The rows of a group that a thread computes: all rows together with the other threads, or its own rows alone.
    struct Worker {
        Share share;
        Scratch& scratch;
        int64_t begin, end;
    };
    // With at least this many rows per thread, each thread computes its own rows from one attention to the next. So it
    // reads what it has written itself, not what lies in another core's cache.
    static constexpr int64_t kAlone = 96;

    void copy_rows(const float* from, const int64_t* from_rows, float* to, const int64_t* to_rows, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            std::copy_n(from + (from_rows ? from_rows[i] : i) * ld_hidden_, model_.hidden,
                        to + (to_rows ? to_rows[i] : i) * ld_hidden_);
        }
    }

    void put_states(const HiddenRows& given, float* x) {
        for (int64_t i = 0; i < given.num_rows; ++i) {
            std::copy_n(given.states + i * model_.hidden, model_.hidden, x + given.rows[i] * ld_hidden_);
        }
    }
    void take_states(const HiddenRows& wanted, const float* x) {
        for (int64_t i = 0; i < wanted.num_rows; ++i) {
            std::copy_n(x + wanted.rows[i] * ld_hidden_, model_.hidden, wanted.states + i * model_.hidden);
        }
    }

    // This thread's share of a phase that computes rows one by one. Ends the phase.
    template <class Treat>
    void each_row(Worker& worker, const Treat& treat) {
        constexpr int64_t kRun = 8;
        for (int64_t from; (from = worker.begin + worker.share.take() * kRun) < worker.end;) {
            for (int64_t row = from; row < std::min(from + kRun, worker.end); ++row) treat(row);
        }
        worker.share.barrier();
    }

    void multiply(Worker& worker, const Product& product) {
        ramet::multiply(worker.share, product, worker.scratch.product);
        worker.share.barrier();
    }

    void embed(const Step& step, float* x, int thread) {
        Worker worker = {{team_, false}, scratch_[thread], 0, step.num_rows};
        each_row(worker, [&](int64_t row) {
            float* to = x + row * ld_hidden_;
            const int64_t token = step.tokens[row], hidden = model_.hidden;
            if (model_.embedding == nullptr) {
                unpack_row(model_.table, token, to);
            } else if (model_.embedding_is_bf16) {
                const bf16* from = static_cast<const bf16*>(model_.embedding) + token * hidden;
                for (int64_t i = 0; i < hidden; ++i) to[i] = to_float(from[i]);
            } else {
                std::copy_n(static_cast<const float*>(model_.embedding) + token * hidden, hidden, to);
            }
            if (model_.embedding_scale != 1) {
                for (int64_t i = 0; i < hidden; ++i) to[i] *= model_.embedding_scale;
            }
        });
    }

    // Compute one layer. `x`: the states of all rows of the group.
    void run_layer(int64_t index, const Group& group, float* x, Worker& worker) {
        const Layer& layer = model_.layers[index];
        const int64_t begin = worker.begin, m = worker.end - begin;
        auto adapt = [&](LowRank AdapterLayer::* product, const Buffer<float>& in, int64_t ld_in, float* out,
                         int64_t ld_out) {
            for (int64_t i = 0; i < group.num_adapted; ++i) {
                const Adapted& rows = group.adapted[i];
                add_low_rank(worker, rows.layers[index].*product, in.data() + rows.first * ld_in, ld_in,
                             rows.stop - rows.first, out + rows.first * ld_out, ld_out);
            }
        };
        auto multiply_rows = [&](const Matrix& w, const Buffer<float>& in, int64_t ld_in, float* out, int64_t ld_out,
                                 Into into) {
            const bool gives_pairs = pairs_ && (into == Into::kSilu || into == Into::kGelu);
            multiply(worker, {in.data() + begin * ld_in, ld_in, m, &w, out + begin * ld_out, ld_out, ld_out, into,
                              pairs_, gives_pairs});
        };
        // x += the product, normalised first if there is a norm.
        auto add_product = [&](const Matrix& w, const Buffer<float>& in, int64_t ld_in, const float* norm,
                               LowRank AdapterLayer::* product) {
            float* out = norm == nullptr ? x : normed_.data();
            multiply_rows(w, in, ld_in, out, ld_hidden_, norm == nullptr ? Into::kAdd : Into::kStore);
            adapt(product, in, ld_in, out, ld_hidden_);
            if (norm == nullptr) return;
            each_row(worker, [&](int64_t row) {
                float *from = out + row * ld_hidden_, *to = x + row * ld_hidden_;
                normalise_row(from, norm, model_.hidden, from);
                for (int64_t i = 0; i < model_.hidden; ++i) to[i] += from[i];
            });
        };
        normalise(worker, x, nullptr, layer.input_norm);
        multiply_qkv(worker, layer, begin, m, pairs_);
        adapt(&AdapterLayer::qkv, normed_, ld_hidden_, qkv_.data(), ld_qkv_);
        each_row(worker, [&](int64_t row) {
            rotate(layer, group.cosine, group.sine, row);
            write_row(layer, group.kv_write[row], row);
        });
        if (worker.share.size() != team_.size()) team_.barrier();
        attention_.run(team_, layer.kv, qkv_.data(), ld_qkv_, attended_.data(), ld_attention_,
                       worker.scratch.attention);
        team_.barrier();
        if (attention_.merges()) {
            attention_.merge(team_, layer.kv, attended_.data(), ld_attention_);
            team_.barrier();
        }
        add_product(layer.o, attended_, ld_attention_, layer.o_norm, &AdapterLayer::o);
        if (layer.gate_up.n == 0) return;
        normalise(worker, x, nullptr, layer.post_norm);
        if (group.num_adapted) {
            multiply_rows(layer.gate_up, normed_, ld_hidden_, gates_.data(), ld_gates_, Into::kStore);
            adapt(&AdapterLayer::gate_up, normed_, ld_hidden_, gates_.data(), ld_gates_);
            each_row(worker, [&](int64_t row) { close_gates(layer.gate_up.panels(), row); });
        } else {
            multiply_rows(layer.gate_up, normed_, ld_hidden_, inner_.data(), ld_inner_, model_.gate);
        }
        add_product(layer.down, inner_, ld_inner_, layer.down_norm, &AdapterLayer::down);
    }

    // Compute queries, keys and values of rows [begin, begin + m) of normed_.
    void multiply_qkv(Worker& worker, const Layer& layer, int64_t begin, int64_t m, bool takes_pairs) {
        const float* in = normed_.data() + begin * ld_hidden_;
        int64_t column = 0;
        for (const Matrix& w : layer.qkv) {
            if (w.n == 0) continue;
            multiply(worker, {in, ld_hidden_, m, &w, qkv_.data() + begin * ld_qkv_ + column, ld_qkv_,
                              ld_qkv_ - column, Into::kStore, takes_pairs});
            column += w.n;
        }
    }

    // out [m, ...] += b (a in), in two phases.
    void add_low_rank(Worker& worker, const LowRank& added, const float* in, int64_t ld_in, int64_t m, float* out,
                      int64_t ld_out) {
        if (added.a.data == nullptr) return;
        const int64_t ld = round_up(added.a.n, kPanel);
        multiply(worker, {in, ld_in, m, &added.a, low_rank_.data(), ld, ld, Into::kStore, pairs_});
        multiply(worker, {low_rank_.data(), ld, m, &added.b, out, ld_out, ld_out, Into::kAdd});
    }

    // Apply the gated activation to a row of gates_; the result goes to inner_.
    void close_gates(int64_t panels, int64_t row) {
        const float* gates = gates_.data() + row * ld_gates_;
        float* out = inner_.data() + row * ld_inner_;
        for (int64_t p = 0; p < panels; ++p, gates += kPanel) {
            const Vec gate = load(gates);
            store(out + p * kLanes, mul(model_.gate == Into::kGelu ? gelu(gate) : silu(gate), load(gates + kLanes)));
        }
        round_row(out, model_.inner);
    }

    // RMSNorm of some rows of x, written to normed_ in order.
    void normalise(Worker& worker, const float* x, const int64_t* rows, const float* weight) {
        each_row(worker, [&](int64_t i) {
            float* out = normed_.data() + i * ld_hidden_;
            normalise_row(x + (rows ? rows[i] : i) * ld_hidden_, weight, model_.hidden, out);
            round_row(out, model_.hidden);
        });
    }

    // Round activations to pairs in place, if products take pairs.
    void round_row(float* row, int64_t n) const {
        if (pairs_) round_to_pairs(row, n, reinterpret_cast<uint32_t*>(row));
    }

    void normalise_row(const float* x, const float* weight, int64_t n, float* out) const {
        Vec squares = zero();
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
        float sum = reduce_add(squares);
        for (; i < n; ++i) sum += x[i] * x[i];
        float scale = 1 / std::sqrt(sum / float(n) + model_.eps);
        for (i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
    }

    // Norm and rotation of a row's queries and keys, in place.
    void rotate(const Layer& layer, const float* cosines, const float* sines, int64_t row) {
        const Shape& shape = model_.shape;
        const int64_t half = shape.dim / 2;
        float* q = qkv_.data() + row * ld_qkv_;
        for (int64_t head = 0; head < shape.heads + shape.kv_heads; ++head) {
            float* x = q + head * shape.dim;
            if (layer.q_norm != nullptr) {
                normalise_row(x, head < shape.heads ? layer.q_norm : layer.k_norm, shape.dim, x);
            }
            const float *cosine = cosines + row * half, *sine = sines + row * half;
            for (int64_t d = 0; d < half; ++d) {
                float first = x[d], second = x[half + d];
                x[d] = first * cosine[d] - second * sine[d];
                x[half + d] = second * cosine[d] + first * sine[d];
            }
        }
    }

    // Write a row's keys and values to the pool.
    void write_row(const Layer& layer, int64_t slot, int64_t row) {
        const Shape& shape = model_.shape;
        const int64_t width = shape.kv_heads * shape.dim;
        const float* k = qkv_.data() + row * ld_qkv_ + shape.heads * shape.dim;
        if (slot < 0) return;
        if (shape.is_bf16) {
            write(k, width, static_cast<bf16*>(layer.kv.k) + slot * width);
            write(k + width, width, static_cast<bf16*>(layer.kv.v) + slot * width);
        } else {
            write(k, width, static_cast<float*>(layer.kv.k) + slot * width);
            write(k + width, width, static_cast<float*>(layer.kv.v) + slot * width);
        }
    }

    static void write(const float* from, int64_t n, bf16* to) {
        for (int64_t i = 0; i < n; ++i) to[i] = to_bf16(from[i]);
    }
    static void write(const float* from, int64_t n, float* to) { std::copy_n(from, n, to); }

    const Model model_;
    Team& team_;
    const bool pairs_;  // whether activations are rounded to pairs when they are written, not at each product
    Attention attention_;
    std::unique_ptr<Scratch[]> scratch_;
    int64_t ld_hidden_, ld_qkv_, ld_attention_, ld_inner_, ld_gates_;
    Buffer<float> hidden_, alive_, normed_, qkv_, attended_, inner_, gates_, low_rank_;
};

}  // namespace ramet
