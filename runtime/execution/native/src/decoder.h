// The decoder stack: one call computes a step, and all threads work on each phase of a layer.
#pragma once

#include "attention.h"
#include "experts.h"
#include "recurrence.h"

namespace ramet {

// Latent attention; see LatentAttention in runtime/execution/mixers/latent.py.
struct Latent {
    Matrix query_down;        // without columns, queries are computed from the input
    const float* query_norm;  // [query_down.n]
    Matrix query;             // heads x (plain + rotated) columns
    Matrix row;               // rank + rotated columns
    const float* row_norm;    // [rank]
    const Matrix* absorb;     // [heads], plain to rank
    const Matrix* expand;     // [heads], dim to value
    int64_t rank, plain, rotated, value;
    float factor;  // on queries
    float eps;     // of its norms
};

struct Layer {
    const float* input_norm;  // [hidden]
    const float* post_norm;   // [hidden]
    const float* q_norm;      // [dim]; null: no norm
    const float* k_norm;      // [dim]
    const float* o_norm;      // [hidden], normalises the product before the residual is added; null: no norm
    const float* down_norm;   // [hidden], likewise
    // What the mixer reads, side by side, as their storage may differ; unused ones have no columns. Of attention:
    // queries, keys, values, and gates of the results if the model has them.
    Matrix inputs[4];
    Matrix o;
    Matrix gate_up;  // paired; unused if there are experts, as `down`
    Matrix down;
    const Experts* experts;  // null: none
    LayerKV kv;
    const Latent* latent;  // null: the layer has keys and values of its own
    LayerState state;
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
    int64_t is_gated;  // whether a sigmoid multiplies the results of attention
    RecurrenceShape recurrence;
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
    int64_t adds;
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
    const StateRows* states;  // of a model with recurrent layers
    int64_t num_states;
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
          pairs_(kMultipliesPairs && is_bf16(model)), attention_(model.shape, pairs_ && !model.is_gated),
          recurrence_(model.recurrence),
          scratch_(new Scratch[team.size()]) {
        const Shape& shape = model.shape;
        // An odd number of cache lines, so that the rows of a tile use different sets of the cache.
        auto stride = [](int64_t n) { return round_up(n, kPanel) + (round_up(n, kPanel) / 16 % 2 ? 0 : 16); };
        ld_hidden_ = stride(model.hidden);
        const int64_t gates = model.is_gated ? shape.heads : 0;
        ld_qkv_ = stride(std::max((shape.heads + 2 * shape.kv_heads + gates) * shape.dim, model.recurrence.columns()));
        ld_attention_ = stride(std::max(shape.heads * shape.dim, model.recurrence.outputs()));
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
        reserve_latent(step.num_rows);
        for (int64_t i = 0; i < model_.num_layers; ++i) {
            if (const Experts* experts = model_.layers[i].experts) mixture_.reserve(*experts, model_.hidden, step.num_rows);
        }
        recurrence_.plan(step.states, step.num_states, step.num_rows);
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
            // Otherwise, each thread would round all rows of a product with codes.
            const bool pays = pairs_ || model_.layers[0].o.storage == Storage::kCodes;
            const bool alone = pays && !group.num_adapted && group.num_rows >= kAlone * team_.size();
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
        reserve_latent(m);
        team_.run([&](int thread) {
            Worker worker = {{team_, false}, scratch_[thread], 0, m};
            each_row(worker, [&](int64_t row) {
                normalise_row(wanted.states + row * model_.hidden, layer.input_norm, model_.hidden, model_.eps,
                              normed_.data() + row * ld_hidden_);
            });
            multiply_inputs(worker, layer, 0, m, false);
            each_row(worker, [&](int64_t row) {
                rotate(layer, wanted.cosine, wanted.sine, row);
                if (layer.latent != nullptr) {
                    const float* last = qkv_.data() + row * ld_qkv_ + shape.heads * shape.dim;
                    std::copy_n(last, shape.dim, qkv_.data() + row * ld_qkv_ + (shape.heads + 1) * shape.dim);
                }
                std::copy_n(qkv_.data() + row * ld_qkv_, width, wanted.out + row * width);
            });
        });
    }

  private:
    static bool is_bf16(const Model& model) {
        bool all = model.head.storage == Storage::kBfloat16;
        for (int64_t i = 0; i < model.num_layers; ++i) {
            const Layer& layer = model.layers[i];
            for (const Matrix* w : {layer.inputs, &layer.o, &layer.gate_up, &layer.down}) {
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
            float* row = x + given.rows[i] * ld_hidden_;
            for (int64_t j = 0; j < model_.hidden; ++j) {
                row[j] = given.states[i * model_.hidden + j] + (given.adds ? row[j] : 0.0f);
            }
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
                normalise_row(from, norm, model_.hidden, model_.eps, from);
                for (int64_t i = 0; i < model_.hidden; ++i) to[i] += from[i];
            });
        };
        normalise(worker, x, nullptr, layer.input_norm);
        multiply_inputs(worker, layer, begin, m, pairs_);
        adapt(&AdapterLayer::qkv, normed_, ld_hidden_, qkv_.data(), ld_qkv_);
        if (layer.state.taps != nullptr) {
            recur(layer, worker);
        } else {
            attend(layer, group, worker);
        }
        if (layer.latent != nullptr) {
            expand_latent(worker, *layer.latent);
            add_product(layer.o, values_, ld_values_, layer.o_norm, &AdapterLayer::o);
        } else {
            add_product(layer.o, attended_, ld_attention_, layer.o_norm, &AdapterLayer::o);
        }
        if (layer.experts != nullptr) return mix(layer, group.num_rows, x, worker);
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

    void attend(const Layer& layer, const Group& group, Worker& worker) {
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
        if (!model_.is_gated) return;
        const Shape& shape = model_.shape;
        const int64_t width = shape.heads * shape.dim, gates = width + 2 * shape.kv_heads * shape.dim;
        each_row(worker, [&](int64_t row) {
            const float* gate = qkv_.data() + row * ld_qkv_ + gates;
            float* out = attended_.data() + row * ld_attention_;
            for (int64_t i = 0; i < width; i += kLanes) {
                const int n = int(std::min<int64_t>(kLanes, width - i));
                store(out + i, gated(load(out + i, n), load(gate + i, n)), n);
            }
            round_row(out, width);
        });
    }

    // x += the layer's experts. All threads compute all rows, because rows of several threads choose the same experts.
    void mix(const Layer& layer, int64_t m, float* x, Worker& worker) {
        if (worker.share.size() != team_.size()) team_.barrier();
        Worker all = {{team_, false}, worker.scratch, 0, m};
        each_row(all, [&](int64_t row) {
            normalise_row(x + row * ld_hidden_, layer.post_norm, model_.hidden, model_.eps,
                          normed_.data() + row * ld_hidden_);
        });
        mixture_.run(team_, *layer.experts, normed_.data(), x, ld_hidden_, model_.hidden, m, worker.scratch.product);
    }

    void recur(const Layer& layer, Worker& worker) {
        if (worker.share.size() != team_.size()) team_.barrier();
        recurrence_.run(team_, layer.state, qkv_.data(), ld_qkv_, attended_.data(), ld_attention_);
        each_row(worker, [&](int64_t row) {
            float* out = attended_.data() + row * ld_attention_;
            recurrence_.finish(layer.state, row, qkv_.data() + row * ld_qkv_, out, model_.eps);
            round_row(out, model_.recurrence.outputs());
        });
    }

    // Compute what the mixer reads, for rows [begin, begin + m) of normed_.
    void multiply_inputs(Worker& worker, const Layer& layer, int64_t begin, int64_t m, bool takes_pairs) {
        if (layer.latent != nullptr) return multiply_latent(worker, *layer.latent, takes_pairs);
        const float* in = normed_.data() + begin * ld_hidden_;
        int64_t column = 0;
        for (const Matrix& w : layer.inputs) {
            if (w.n == 0) continue;
            multiply(worker, {in, ld_hidden_, m, &w, qkv_.data() + begin * ld_qkv_ + column, ld_qkv_,
                              ld_qkv_ - column, Into::kStore, takes_pairs});
            column += w.n;
        }
    }

    void reserve_latent(int64_t num_rows) {
        for (int64_t i = 0; i < model_.num_layers; ++i) {
            const Latent* latent = model_.layers[i].latent;
            if (latent == nullptr) continue;
            const int64_t heads = model_.shape.heads;
            ld_values_ = round_up(heads * latent->value, kPanel);
            low_.reserve(num_rows * latent->query_down.n);
            queries_.reserve(num_rows * latent->query.n);
            absorbed_.reserve(num_rows * heads * latent->rank);
            rows_.reserve(num_rows * latent->row.n);
            values_.reserve(num_rows * ld_values_);
        }
    }

    // Compute the parts of queries and of the row, from normed_ to queries_, absorbed_ and rows_.
    void multiply_latent(Worker& worker, const Latent& latent, bool takes_pairs) {
        const int64_t begin = worker.begin, m = worker.end - begin, heads = model_.shape.heads;
        auto put = [&](const Matrix& w, const float* in, int64_t ld_in, float* out, int64_t ld_out, bool pairs) {
            multiply(worker, {in + begin * ld_in, ld_in, m, &w, out + begin * ld_out, ld_out, w.n, Into::kStore, pairs});
        };
        put(latent.row, normed_.data(), ld_hidden_, rows_.data(), latent.row.n, takes_pairs);
        const int64_t low = latent.query_down.n, size = latent.plain + latent.rotated;
        if (low == 0) {
            put(latent.query, normed_.data(), ld_hidden_, queries_.data(), heads * size, takes_pairs);
        } else {
            put(latent.query_down, normed_.data(), ld_hidden_, low_.data(), low, takes_pairs);
            each_row(worker, [&](int64_t row) {
                float* x = low_.data() + row * low;
                normalise_row(x, latent.query_norm, low, latent.eps, x);
            });
            put(latent.query, low_.data(), low, queries_.data(), heads * size, false);
        }
        for (int64_t head = 0; head < heads; ++head) {
            put(latent.absorb[head], queries_.data() + head * size, heads * size, absorbed_.data() + head * latent.rank,
                heads * latent.rank, false);
        }
    }

    // Join a row's parts in qkv_, and rotate them. Each half of a head has rotated dimensions before the others.
    void rotate_latent(const Latent& latent, const float* cosine, const float* sine, int64_t row) {
        const int64_t heads = model_.shape.heads, half = model_.shape.dim / 2, turned = latent.rotated / 2;
        auto join = [&](const float* rotated, const float* others, float factor, float* to) {
            for (int64_t d = 0; d < turned; ++d) {
                const float first = rotated[d] * factor, second = rotated[turned + d] * factor;
                to[d] = first * cosine[d] - second * sine[d];
                to[half + d] = second * cosine[d] + first * sine[d];
            }
            for (int64_t d = turned; d < half; ++d) {
                to[d] = others[d - turned] * factor;
                to[half + d] = others[half - 2 * turned + d] * factor;
            }
        };
        float *to = qkv_.data() + row * ld_qkv_, *own = rows_.data() + row * latent.row.n;
        const float* queries = queries_.data() + row * latent.query.n;
        const float* absorbed = absorbed_.data() + row * heads * latent.rank;
        for (int64_t head = 0; head < heads; ++head) {
            const float* query = queries + head * (latent.plain + latent.rotated);
            join(query + latent.plain, absorbed + head * latent.rank, latent.factor, to + head * model_.shape.dim);
        }
        normalise_row(own, latent.row_norm, latent.rank, latent.eps, own);
        join(own + latent.rank, own, 1, to + heads * model_.shape.dim);
    }

    // Compute values_ from the sums of rows in attended_.
    void expand_latent(Worker& worker, const Latent& latent) {
        const int64_t begin = worker.begin, m = worker.end - begin, lanes = pairs_ ? 2 : 1;
        for (int64_t head = 0; head < model_.shape.heads; ++head) {
            const float* in = attended_.data() + begin * ld_attention_ + head * model_.shape.dim / lanes;
            float* out = values_.data() + begin * ld_values_ + head * latent.value / lanes;
            multiply(worker, {in, ld_attention_, m, &latent.expand[head], out, ld_values_, latent.value, Into::kStore,
                              pairs_, pairs_});
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
            normalise_row(x + (rows ? rows[i] : i) * ld_hidden_, weight, model_.hidden, model_.eps, out);
            round_row(out, model_.hidden);
        });
    }

    // Round activations to pairs in place, if products take pairs.
    void round_row(float* row, int64_t n) const {
        if (pairs_) round_to_pairs(row, n, reinterpret_cast<uint32_t*>(row));
    }

    static void normalise_row(const float* x, const float* weight, int64_t n, float eps, float* out) {
        Vec squares = zero();
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
        float sum = reduce_add(squares);
        for (; i < n; ++i) sum += x[i] * x[i];
        float scale = 1 / std::sqrt(sum / float(n) + eps);
        for (i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
    }

    // Norm and rotation of a row's queries and keys, in place.
    void rotate(const Layer& layer, const float* cosines, const float* sines, int64_t row) {
        const Shape& shape = model_.shape;
        const int64_t half = shape.dim / 2;
        float* q = qkv_.data() + row * ld_qkv_;
        if (layer.latent != nullptr) {
            return rotate_latent(*layer.latent, cosines + row * half, sines + row * half, row);
        }
        for (int64_t head = 0; head < shape.heads + shape.kv_heads; ++head) {
            float* x = q + head * shape.dim;
            if (layer.q_norm != nullptr) {
                normalise_row(x, head < shape.heads ? layer.q_norm : layer.k_norm, shape.dim, model_.eps, x);
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
        auto put = [&](const float* from, void* to) {
            if (shape.is_bf16) {
                write(from, width, static_cast<bf16*>(to) + slot * width);
            } else {
                write(from, width, static_cast<float*>(to) + slot * width);
            }
        };
        put(k, layer.kv.k);
        if (layer.latent == nullptr) put(k + width, layer.kv.v);
    }

    static void write(const float* from, int64_t n, bf16* to) {
        for (int64_t i = 0; i < n; ++i) to[i] = to_bf16(from[i]);
    }
    static void write(const float* from, int64_t n, float* to) { std::copy_n(from, n, to); }

    const Model model_;
    Team& team_;
    const bool pairs_;  // whether activations are rounded to pairs when they are written, not at each product
    Attention attention_;
    Recurrence recurrence_;
    Mixture mixture_;
    std::unique_ptr<Scratch[]> scratch_;
    int64_t ld_hidden_, ld_qkv_, ld_attention_, ld_inner_, ld_gates_, ld_values_ = 0;
    Buffer<float> hidden_, alive_, normed_, qkv_, attended_, inner_, gates_, low_rank_;
    Buffer<float> low_, queries_, absorbed_, rows_, values_;  // of latent attention
};

}  // namespace ramet
