// Attention over a plan of query rows and spans. Partial results are merged by log-sum-exp for each row.
#pragma once

#include <cmath>

#include "chains.h"
#include "few_rows.h"

namespace ramet {

struct Shape {
    int64_t heads;
    int64_t kv_heads;
    int64_t dim;
    int64_t page_size;
    int64_t is_bf16;  // whether the pool is bfloat16, else float32
};

// One layer's keys and values: [slots, kv_heads, dim] each.
struct LayerKV {
    void* k;
    void* v;
    const float* sinks;  // [heads], score of one more key per head whose value is 0; null: no such key
};

// Cuts a plan into pieces, which threads take: some rows of an edge, one kv head, and some keys of the span.
//
// Query heads that share a kv head are folded into the rows, so that a key is read once for all of them: folded row
// f is row f / group, head kv_head * group + f % group. A piece is a flash attention (Dao et al., 2022) over blocks of
// keys. A block is packed for the micro-kernel once for all rows of the piece; for few rows it is read in place.
// Kernels that multiply bfloat16 pairs round queries and weights to bfloat16; sums stay float32. Few rows over many
// keys (decoding) are cut along the keys, many rows (prefill) along the rows. A piece of a chain reads several spans.
//
// With bfloat16 pairs, the result of a row is the same to the bit, however the plan is cut and whichever other rows are
// computed with it. Blocks, and sections of several blocks, are counted from the beginning of the sequence. A block is
// summed from zero; blocks are added to a section in order, and sections to the total. All weights are relative to a
// power of two, so changing this base is exact.
class Attention {
  public:
    // `gives_pairs`: whether results are rounded to bfloat16 pairs for the next product.
    explicit Attention(const Shape& shape, bool gives_pairs = false)
        : shape_(shape), gives_pairs_(gives_pairs), group_(shape.heads / shape.kv_heads),
          wide_(round_up(shape.dim, kPanel)), most_rows_(std::max<int64_t>(kFoldedRows / group_, 1)) {}

    // Cut the plan. One thread calls this before all threads call `run`.
    void plan(const Span* spans, const Edge* edges, int64_t num_edges, int64_t num_rows, int threads) {
        spans_ = spans, edges_ = edges, num_edges_ = num_edges, num_rows_ = num_rows;
        pieces_.clear(), links_.clear(), slot_.clear();
        const int64_t least = std::max<int64_t>(kLeastFoldedRows / group_, 1);
        const int64_t heads = shape_.kv_heads, wanted = threads * kPiecesPerThread;
        chains_.find(edges, num_edges, num_rows, {least, most_rows_, heads, 2 * threads, wanted},
                     [this](const Edge& edge) { return edge.hidden == nullptr && place(edge) == 0; });
        // The cost of a piece is measured in keys x tiles of rows.
        int64_t chained = 0, largest = 0;
        for (const Chains::Run& run : chains_.runs()) {
            chained += add_run(run);
            largest = std::max(largest, pieces_.back().cost);
        }
        int64_t work = count_loose();
        if (largest * threads > work + chained) {  // one thread would work while the others wait
            chains_.clear(), pieces_.clear(), links_.clear();
            chained = 0, work = count_loose();
        }
        work += chained;
        std::vector<bool> has_one_edge(num_rows);
        for (int64_t row = 0; row < num_rows; ++row) has_one_edge[row] = row_parts_[row + 1] == 1;
        row_parts_.assign(num_rows + 1, 0);
        for (const Chains::Run& run : chains_.runs()) {
            std::fill(row_parts_.begin() + run.first + 1, row_parts_.begin() + run.last + 1, 1);
        }
        const int64_t share = work / (threads * kPiecesPerThread) + 1;
        for_each_rows([&](const Edge& edge, int64_t from, int64_t rows, int64_t low, int64_t keys) {
            const bool few = reads_in_place(edge, from, rows);
            // A piece smaller than a section writes a partial result for each block, which is expensive for many rows.
            const bool fine = few || share / tiles(rows) < kSection / 4;
            const int64_t unit = fine ? kLeastKeys : kSection, at = place(edge), high = low + keys;
            const int64_t most = std::max(share / tiles(rows), unit), parts = (keys + most / 2) / most;
            const int64_t step = round_up(keys / std::max<int64_t>(parts, 1), unit);
            auto end_of = [&](int64_t begin) { return std::min((at + begin) / unit * unit + step - at, high); };
            bool whole = end_of(low) == high;
            for (int64_t i = from; i < from + rows; ++i) whole = whole && has_one_edge[edge.rows[i]];
            for (int64_t begin = low, end; begin < high; begin = end) {
                end = end_of(begin);
                const int64_t link = int64_t(links_.size()), slot = int64_t(slot_.size());
                const int64_t cost = (end - begin) * tiles(rows);
                links_.push_back({&edge, from, rows, 0, begin, end});
                for (int64_t head = 0; head < shape_.kv_heads; ++head) {
                    pieces_.push_back({link, link + 1, edge.rows + from, rows, head, few, whole, slot, cost});
                }
                int64_t parts = 0;
                each_part(links_[link], whole, [&](int64_t, int64_t) { ++parts; });
                for (int64_t i = from; i < from + rows; ++i) {
                    slot_.push_back(row_parts_[edge.rows[i] + 1]);
                    row_parts_[edge.rows[i] + 1] += whole ? 1 : parts;
                }
            }
        });
        // Largest pieces first, so that all threads finish at about the same time.
        auto is_larger = [](const Piece& a, const Piece& b) { return a.cost > b.cost; };
        std::stable_sort(pieces_.begin(), pieces_.end(), is_larger);
        merges_ = false;
        for (int64_t row = 0; row < num_rows; ++row) {
            merges_ |= row_parts_[row + 1] != 1;
            row_parts_[row + 1] += row_parts_[row];
        }
        if (!merges_) return;
        partials_.reserve(row_parts_[num_rows] * shape_.heads * partial_size());
        begins_section_.resize(row_parts_[num_rows]);
        for (const Piece& piece : pieces_) {
            if (piece.whole) continue;
            const Link& link = links_[piece.first];
            int64_t part = 0;
            each_part(link, false, [&](int64_t begin, int64_t) {
                for (int64_t i = 0; i < piece.rows; ++i) {
                    begins_section_[partial(piece, i) + part] = (place(*link.edge) + begin) % kSection == 0;
                }
                ++part;
            });
        }
    }

    // A thread's buffers for one piece.
    struct Scratch {
        Buffer<float> q, keys, values, scores, bias;
        Buffer<float> out, top, sum;  // sums of values, base and sum of weights of the current part
        Buffer<float> all;            // partial results of the parts so far
        Buffer<int64_t> offsets;
        Upcoming upcoming;
        int64_t fetches;  // number of upcoming rows to fetch after each product of a tile
    };

    // This thread's share of the attention, as one phase of a team: rotated queries q [num_rows, heads, dim] with row
    // stride `ldq`, results `out` [num_rows, heads, dim] with row stride `ldo`. If `merges`, call `merge` next.
    void run(Team& team, const LayerKV& kv, const float* q, int64_t ldq, float* out, int64_t ldo, Scratch& scratch) {
        const int64_t count = int64_t(pieces_.size());
        for (int64_t next = team.take(); next < count;) {
            const Piece& piece = pieces_[next];
            next = team.take();
            const Piece* after = next < count ? &pieces_[next] : nullptr;
            if (shape_.is_bf16) {
                attend<bf16>(piece, after, kv, q, ldq, out, ldo, scratch);
            } else {
                attend<float>(piece, after, kv, q, ldq, out, ldo, scratch);
            }
        }
    }

    // Whether a row has no partial result or several, so that `merge` is needed.
    bool merges() const { return merges_; }

    // This thread's share of merging partial results, as one phase of a team. Rows without visible keys get zeros.
    void merge(Team& team, const LayerKV& kv, float* out, int64_t ldo) {
        constexpr int64_t kRun = 4;
        const int64_t heads = shape_.heads, size = partial_size();
        std::vector<float> all(size);
        for (int64_t from; (from = team.take() * kRun) < num_rows_;) {
            for (int64_t row = from; row < std::min(from + kRun, num_rows_); ++row) {
                const int64_t first = row_parts_[row], last = row_parts_[row + 1];
                if (last - first == 1) continue;
                for (int64_t head = 0; head < heads; ++head) {
                    std::fill(all.begin(), all.end(), 0.0f);
                    all.back() = kMinusInfinity;
                    float* const parts = partials_.data() + head * size;
                    for (int64_t p = first; p < last;) {
                        float* section = parts + p * heads * size;
                        while (++p < last && !begins_section_[p]) add_part(section, parts + p * heads * size);
                        add_part(all.data(), section);
                    }
                    finish(all.data(), kv, head, out + row * ldo);
                }
            }
        }
    }

  private:
    // The cost of the rows outside of chains; `row_parts_` gets the number of edges of each.
    int64_t count_loose() {
        int64_t work = 0;
        row_parts_.assign(num_rows_ + 1, 0);
        for_each_rows([&](const Edge& edge, int64_t from, int64_t rows, int64_t, int64_t keys) {
            work += keys * tiles(rows) * shape_.kv_heads;
            for (int64_t i = from; i < from + rows; ++i) ++row_parts_[edge.rows[i] + 1];
        });
        return work;
    }

    static constexpr int64_t kSection = 16 * kKeys;
    static constexpr int64_t kFoldedRows = 192;     // of a piece: enough to repay packing a block
    static constexpr int64_t kLeastFoldedRows = 48;  // of a chain's piece
    static constexpr int64_t kLeastKeys = 256;      // of a piece: fewer would not repay its partial result
    static constexpr int64_t kPiecesPerThread = 6;
    static constexpr int kFewRows = 4;         // most folded rows computed together over keys read in place
    static constexpr int64_t kMostKeys = 4 * kKeys;  // most keys in a block
    static constexpr int64_t kScoreStride = kMostKeys + 16;

    // Some rows of an edge, and some keys of its span.
    struct Link {
        const Edge* edge;
        int64_t from, rows;  // within the edge
        int64_t at;          // of the piece's rows, the first of these
        int64_t begin, end;  // keys
    };

    struct Piece {
        int64_t first, last;  // its links: one, or those of a run of a chain
        const int32_t* ids;   // [rows], its rows in the plan
        int64_t rows;
        int64_t head;        // kv head
        bool few;            // whether it has few rows, so that keys are read in place
        bool whole;          // whether its rows have no other piece for this head
        int64_t first_slot;  // index into slot_ of its first row
        int64_t cost;

        // Keys of a block: many repay the search for the largest scores, but they must stay in the cache.
        int64_t block(bool pairs) const { return few || pairs ? kMostKeys : kKeys; }
    };

    // Floats of a partial result: kLanes sums of weights, the weighted sum [dim] of values, and the weights' base.
    int64_t partial_size() const { return kLanes + shape_.dim + 1; }
    // Index of the first partial result of a row of a piece.
    int64_t partial(const Piece& piece, int64_t row) const {
        return row_parts_[piece.ids[row]] + slot_[piece.first_slot + row];
    }
    // The offset of a span's row 0 from the beginning of its section.
    int64_t place(const Edge& edge) const {
        const int64_t position = spans_[edge.span].position;
        return position % kKeys == 0 ? position % kSection : 0;
    }

    // The end of the keys of a link that are summed together from `begin` on: up to the end of the section, or of the
    // block if another piece may have the beginning of the section.
    int64_t end_of_part(const Link& link, bool whole, int64_t begin) const {
        const int64_t into = (place(*link.edge) + begin) % kSection;
        return std::min(link.end, begin + (into == 0 || whole ? kSection - into : kKeys));
    }

    // Call visit(begin, end) for the ranges of keys of a link that are summed separately.
    template <class Visit>
    void each_part(const Link& link, bool whole, const Visit& visit) const {
        for (int64_t begin = link.begin, end; begin < link.end; begin = end) {
            visit(begin, end = end_of_part(link, whole, begin));
        }
    }

    void set_part(float* to, const float* base, const float* sums, const float* values) const {
        std::copy_n(sums, kLanes, to);
        std::copy_n(values, shape_.dim, to + kLanes);
        to[kLanes + shape_.dim] = *base;
    }

    // Add a part to a partial result.
    void add_part(float* to, const float* base, const float* sums, const float* values) const {
        float& top = to[kLanes + shape_.dim];
        const float highest = std::max(top, *base);
        if (highest == kMinusInfinity) return;
        const float mine = power_of_two(top - highest), other = power_of_two(*base - highest);
        top = highest;
        // Both factors are powers of two, so only the additions round.
        const Vec m = set1(mine), o = set1(other);
        store(to, fma(load(sums), o, mul(load(to), m)));
        to += kLanes;
        each_lanes(shape_.dim, [&](int64_t d, auto n) {
            store_lanes(to + d, fma(load_lanes(values + d, n), o, mul(load_lanes(to + d, n), m)), n);
        });
    }
    void add_part(float* to, const float* part) const {
        add_part(to, part + kLanes + shape_.dim, part, part + kLanes);
    }

    // Write a head's result into a row `out` [heads, dim]: its sums divided by the sum of weights.
    void finish(float* all, const LayerKV& kv, int64_t head, float* out) const {
        const float sum = reduce_add(load(all)), base = all[kLanes + shape_.dim];
        const float sink = kv.sinks != nullptr && sum > 0 ? std::exp2(kv.sinks[head] * kLog2E - base) : 0;
        const float scale = sum > 0 ? 1 / (sum + sink) : 0;
        float* const values = all + kLanes;
        for (int64_t d = 0; d < shape_.dim; ++d) values[d] *= scale;
        if (gives_pairs_) {
            round_to_pairs(values, shape_.dim, reinterpret_cast<uint32_t*>(out) + head * shape_.dim / 2);
        } else {
            std::copy_n(values, shape_.dim, out + head * shape_.dim);
        }
    }

    int64_t tiles(int64_t rows) const { return (rows * group_ + kMaxRows - 1) / kMaxRows; }

    // The smallest and the largest `visible` of rows [from, to) of an edge.
    std::pair<int64_t, int64_t> limits(const Edge& edge, int64_t from, int64_t to) const {
        const int64_t length = spans_[edge.span].length;
        if (edge.visible == nullptr) return {length, length};
        auto [least, most] = std::minmax_element(edge.visible + from, edge.visible + to);
        return {*least, *most};
    }

    // The smallest and the largest `hidden` of rows [from, to) of an edge.
    static std::pair<int64_t, int64_t> hidden(const Edge& edge, int64_t from, int64_t to) {
        if (edge.hidden == nullptr) return {0, 0};
        auto [least, most] = std::minmax_element(edge.hidden + from, edge.hidden + to);
        return {*least, *most};
    }

    // Call visit(edge, first row, number of rows, first key, number of keys) for runs of rows that see any key, but for
    // rows of chains.
    template <class Visit>
    void for_each_rows(const Visit& visit) const {
        for (int64_t e = 0; e < num_edges_; ++e) {
            const Edge& edge = edges_[e];
            for (int64_t from = 0, to; from < edge.num_rows; from = to) {
                const bool chained = chains_.has(edge.rows[from]);
                for (to = from + 1; to < edge.num_rows && chains_.has(edge.rows[to]) == chained; ++to) {
                    if (!chained && to - from == most_rows_) break;
                }
                if (!chained) visit_keys(edge, from, to - from, visit);
            }
        }
    }

    // Call visit(edge, from, rows, first key, number of keys) if these rows see any key.
    template <class Visit>
    void visit_keys(const Edge& edge, int64_t from, int64_t rows, const Visit& visit) const {
        const int64_t low = hidden(edge, from, from + rows).first / kKeys * kKeys;
        const int64_t keys = limits(edge, from, from + rows).second - low;
        if (keys > 0) visit(edge, from, rows, low, keys);
    }

    // Add the pieces of a run of a chain: one for each kv head, with a link for each edge. Returns their cost.
    int64_t add_run(const Chains::Run& run) {
        const int64_t first = int64_t(links_.size()), rows = run.last - run.first;
        int64_t cost = 0;
        for (int64_t e = 0; e < num_edges_; ++e) {
            const auto [from, to] = chains_.part(run, edges_[e], e);
            if (from >= to) continue;
            auto add = [&](const Edge& edge, int64_t begin, int64_t count, int64_t low, int64_t keys) {
                links_.push_back({&edge, begin, count, edge.rows[begin] - run.first, low, low + keys});
                cost += keys * tiles(count);
            };
            visit_keys(edges_[e], from, to - from, add);
        }
        for (int64_t head = 0; head < shape_.kv_heads; ++head) {
            pieces_.push_back({first, int64_t(links_.size()), chains_.ids(run), rows, head, false, true, 0, cost});
        }
        return cost * shape_.kv_heads;
    }

    // Whether to read keys and values in place. This needs few rows, each of which sees all keys of the piece.
    bool reads_in_place(const Edge& edge, int64_t from, int64_t rows) const {
        if (rows * group_ > 2 * kFewRows || shape_.dim % kPanel != 0) return false;
        const auto [least, most] = limits(edge, from, from + rows);
        const auto [low, high] = hidden(edge, from, from + rows);
        return least == most && low == high && low % kKeys == 0 && spans_[edge.span].keep == nullptr;
    }

    template <class T>
    void attend(const Piece& piece, const Piece* after, const LayerKV& kv, const float* q, int64_t ldq, float* out,
                int64_t ldo, Scratch& s) {
        const int64_t folded = piece.rows * group_, size = partial_size();
        float* all = s.all.reserve(folded * size);
        std::fill_n(all, folded * size, 0.0f);
        for (int64_t f = 0; f < folded; ++f) all[(f + 1) * size - 1] = kMinusInfinity;
        for (int64_t i = piece.first; i < piece.last; ++i) attend_link<T>(piece, i, after, kv, q, ldq, s);
        each_folded(piece, 0, folded, [&](int64_t row, int64_t head) {
            if (!is_merged(piece.ids[row])) finish(all, kv, head, out + piece.ids[row] * ldo);
            all += size;
        });
    }

    // Whether a row's result comes from several pieces.
    bool is_merged(int64_t row) const { return row_parts_[row + 1] - row_parts_[row] != 1; }

    // Add a link's attention to the results of its rows.
    template <class T>
    void attend_link(const Piece& piece, int64_t index, const Piece* after, const LayerKV& kv, const float* q,
                     int64_t ldq, Scratch& s) {
        const Link& link = links_[index];
        const int64_t folded = link.rows * group_;
        const bool is_block = link.end - link.begin <= piece.block(kPairs<T>);
        if (!piece.few && is_block && end_of_part(link, piece.whole, link.begin) == link.end) {
            return attend_short<T>(piece, index, after, kv, q, ldq, s);
        }
        load_queries<T>(piece, link, 0, folded, q, ldq, s);
        if (piece.few && !kPairs<T>) split<T>(s.q.data(), folded * wide_);
        int64_t part = 0;
        each_part(link, piece.whole, [&](int64_t begin, int64_t end) {
            attend_part<T>(piece, index, after, kv, begin, end, s);
            if (piece.few && !kPairs<T>) join<T>(s.out.data(), folded * wide_);
            add_result(piece, link, 0, folded, part++, s);
        });
    }

    // The same for a link of one block and one part: tile by tile, so that what a tile uses stays in the fastest cache.
    template <class T>
    void attend_short(const Piece& piece, int64_t index, const Piece* after, const LayerKV& kv, const float* q,
                      int64_t ldq, Scratch& s) {
        const Link& link = links_[index];
        s.upcoming = upcoming(piece, index, after, kv, link.end);
        prepare<T>(piece, link, kv, link.begin, link.end - link.begin, s);
        each_tile(link, [&](int64_t from, int64_t to) {
            load_queries<T>(piece, link, from, to, q, ldq, s);
            clear_sums(to - from, s);
            attend_keys<T>(link, 0, from, to, link.begin, link.end - link.begin, s);
            add_result(piece, link, from, to, 0, s);
        });
        s.upcoming.fetch_rest();
    }

    // Call visit(row of the link, head) for folded rows [from, to) of a link.
    template <class Visit>
    [[gnu::always_inline]] void each_folded(const Piece& piece, int64_t from, int64_t to, const Visit& visit) const {
        // A division for each would take as long as a few keys.
        for (int64_t row = from / group_, head = from % group_; from < to; ++from) {
            visit(row, piece.head * group_ + head);
            if (++head == group_) head = 0, ++row;
        }
    }

    // Load the queries of folded rows [from, to) of a link.
    template <class T>
    void load_queries(const Piece& piece, const Link& link, int64_t from, int64_t to, const float* q, int64_t ldq,
                      Scratch& s) {
        float* queries = s.q.reserve((to - from) * wide_);
        // Scores are scaled by log2(e), so that weights are powers of two.
        const float factor = kLog2E / std::sqrt(float(shape_.dim)), *turn = spans_[link.edge->span].turn;
        const int32_t* ids = piece.ids + link.at;
        each_folded(piece, from, to, [&](int64_t row, int64_t head) {
            load_query<T>(q + ids[row] * ldq + head * shape_.dim, turn, factor, queries);
            queries += wide_;
        });
    }

    void clear_sums(int64_t folded, Scratch& s) {
        std::fill_n(s.out.reserve(folded * wide_), folded * wide_, 0.0f);
        std::fill_n(s.sum.reserve(folded * kLanes), folded * kLanes, 0.0f);
        std::fill_n(s.top.reserve(folded), folded, kMinusInfinity);
    }

    // Add what the scratch buffers have of folded rows [from, to) of a link, its part number `part`, to their results.
    void add_result(const Piece& piece, const Link& link, int64_t from, int64_t to, int64_t part, Scratch& s) {
        const int64_t size = partial_size();
        const float *base = s.top.data(), *sums = s.sum.data(), *values = s.out.data();
        float* all = s.all.data() + (link.at * group_ + from) * size;
        each_folded(piece, from, to, [&](int64_t row, int64_t head) {
            if (!piece.whole && is_merged(piece.ids[link.at + row])) {
                const int64_t slot = (partial(piece, row) + part) * shape_.heads + head;
                set_part(partials_.data() + slot * size, base, sums, values);
            } else {
                add_part(all, base, sums, values);
            }
            ++base, sums += kLanes, values += wide_, all += size;
        });
    }

    // Attention of a link to its keys [begin, end), block by block.
    template <class T>
    void attend_part(const Piece& piece, int64_t index, const Piece* after, const LayerKV& kv, int64_t begin,
                     int64_t end, Scratch& s) {
        const Link& link = links_[index];
        clear_sums(link.rows * group_, s);
        for (int64_t next; begin < end; begin = next) {
            next = std::min(begin + piece.block(kPairs<T>), end);
            s.upcoming = upcoming(piece, index, after, kv, next);
            if (piece.few) {
                attend_in_place<T>(piece, link, kv, begin, next - begin, s);
            } else {
                prepare<T>(piece, link, kv, begin, next - begin, s);
                each_tile(link, [&](int64_t from, int64_t to) {
                    attend_keys<T>(link, from, from, to, begin, next - begin, s);
                });
            }
            s.upcoming.fetch_rest();
        }
    }

    // What to prefetch: the block of keys and values that begins at `begin`, or the first one of the next link.
    Upcoming upcoming(const Piece& piece, int64_t index, const Piece* after, const LayerKV& kv, int64_t begin) const {
        if (begin < links_[index].end) return upcoming(piece, links_[index], kv, begin);
        if (++index < piece.last) return upcoming(piece, links_[index], kv, links_[index].begin);
        const bool none = after == nullptr || after->first == after->last;
        return none ? Upcoming() : upcoming(*after, links_[after->first], kv, links_[after->first].begin);
    }
    Upcoming upcoming(const Piece& piece, const Link& link, const LayerKV& kv, int64_t begin) const {
        const int64_t bytes = shape_.dim * (shape_.is_bf16 ? 2 : 4);
        const int64_t end = std::min(begin + piece.block(kMultipliesPairs && shape_.is_bf16), link.end);
        return Upcoming(spans_[link.edge->span].pages, shape_.page_size, begin, end,
                        static_cast<const char*>(kv.k) + piece.head * bytes,
                        static_cast<const char*>(kv.v) + piece.head * bytes, shape_.kv_heads * bytes, bytes);
    }

    // Attention of few rows to a block of keys, read in place.
    template <class T>
    void attend_in_place(const Piece& piece, const Link& link, const LayerKV& kv, int64_t begin, int64_t count,
                         Scratch& s) {
        const int64_t bytes = shape_.dim * int64_t(sizeof(T)), stride = shape_.kv_heads * bytes;
        const int64_t padded = round_up(count, kPanel), folded = link.rows * group_;
        int64_t* offsets = s.offsets.reserve(kMostKeys + kPanel);
        int64_t i = 0;
        each_slot(spans_[link.edge->span], begin, begin + count, [&](int64_t slot) { offsets[i++] = slot * stride; });
        for (; i < padded; ++i) offsets[i] = offsets[count - 1];
        s.scores.reserve(kFewRows * (kMostKeys + kPanel));
        const char* k = static_cast<const char*>(kv.k) + piece.head * bytes;
        const char* v = static_cast<const char*>(kv.v) + piece.head * bytes;
        for (int64_t from = 0; from < folded; from += kFewRows) {
            const int rows = int(std::min<int64_t>(folded - from, kFewRows));
            few_table<T>[rows - 1](*this, from, k, v, count, s);
        }
    }

    template <int R, class T>
    static void attend_few(Attention& self, int64_t from, const char* k, const char* v, int64_t count, Scratch& s) {
        constexpr int64_t kStride = kMostKeys + kPanel;
        const int64_t wide = self.wide_, dim = self.shape_.dim, padded = round_up(count, kPanel);
        float* scores = s.scores.data();
        score_rows<R, T>(s.q.data() + from * wide, wide, dim, k, s.offsets.data(), count, scores, kStride, s.upcoming);
        for (int r = 0; r < R; ++r) std::fill_n(scores + r * kStride + count, padded - count, kMinusInfinity);
        float decay[kLanes];
        weigh<R, kPairs<T>>(scores, kStride, padded, s.top.data() + from, s.sum.data() + from * kLanes, decay);
        add_values<R, T>(scores, kStride, v, s.offsets.data(), count, decay, s.out.data() + from * wide, wide, dim,
                         s.upcoming);
    }

    // Pack a block of keys and values for many rows.
    template <class T>
    void prepare(const Piece& piece, const Link& link, const LayerKV& kv, int64_t begin, int64_t count, Scratch& s) {
        constexpr int64_t kTogether = kPairs<T> ? 2 : 1;
        s.keys.reserve(kMostKeys * wide_), s.values.reserve(kMostKeys * wide_);
        s.scores.reserve(kMaxRows * kScoreStride), s.bias.reserve(kMaxRows * kMostKeys);
        for (int64_t b = 0; b < count; b += kKeys) {
            prepare_block<T>(spans_[link.edge->span], kv, piece.head, begin + b, std::min(kKeys, count - b),
                             s.keys.data() + b * shape_.dim / kTogether, s.values.data() + b * wide_ / kTogether);
        }
        s.fetches = kKeys / (tiles(link.rows) * (kKeys + wide_) / kPanel) + 1;
    }

    // Call visit(from, to) for each tile of a link's folded rows.
    template <class Visit>
    void each_tile(const Link& link, const Visit& visit) const {
        const int64_t folded = link.rows * group_, count = tiles(link.rows);
        for (int64_t t = 0; t < count; ++t) visit(t * folded / count, (t + 1) * folded / count);
    }

    // Attention of a tile of folded rows [from, to) of a link, row `at` and following of the scratch buffers, to the
    // packed keys.
    template <class T>
    void attend_keys(const Link& link, int64_t at, int64_t from, int64_t to, int64_t begin, int64_t count, Scratch& s) {
        static constexpr auto table = tiles_of<kPairs<T>>(std::make_integer_sequence<int, kMaxRows>());
        const Seen seen = see(link, spans_[link.edge->span], from, to, begin, count, s);
        if (seen.begin < seen.end) table[to - from - 1](*this, at, seen, s);
    }

    // Load a query: rotate and scale it, and round it to pairs if keys are multiplied as pairs.
    template <class T>
    void load_query(const float* from, const float* turn, float factor, float* to) const {
        const int64_t dim = shape_.dim, half = dim / 2;
        each_lanes(turn == nullptr ? dim : half, [&](int64_t d, auto n) {
            const Vec scale = set1(factor), first = load_lanes(from + d, n);
            if (turn == nullptr) return store_lanes(to + d, mul(first, scale), n);
            const Vec second = load_lanes(from + half + d, n);
            const Vec cosine = load_lanes(turn + d, n), sine = load_lanes(turn + half + d, n);
            store_lanes(to + d, mul(fma(first, cosine, mul(second, sub(zero(), sine))), scale), n);
            store_lanes(to + half + d, mul(fma(second, cosine, mul(first, sine)), scale), n);
        });
        if constexpr (kPairs<T>) round_to_pairs(to, dim, reinterpret_cast<uint32_t*>(to));
    }

    // Pack keys [begin, begin + count) of a head, transposed, and their values into the panels that `dot_f32` or
    // `dot_pairs` reads.
    template <class T>
    void prepare_block(const Span& span, const LayerKV& kv, int64_t head, int64_t begin, int64_t count,
                       float* key_panels, float* value_panels) const {
        const int64_t dim = shape_.dim, lanes = dim * int64_t(sizeof(T)) / 4;
        const int64_t bytes = dim * int64_t(sizeof(T)), stride = shape_.kv_heads * bytes;
        const char* k = static_cast<const char*>(kv.k) + head * bytes;
        const char* v = static_cast<const char*>(kv.v) + head * bytes;
        const char *keys[kKeys], *values[kKeys];
        int64_t i = 0;
        each_slot(span, begin, begin + count, [&](int64_t slot) {
            keys[i] = k + slot * stride, values[i] = v + slot * stride;
            ++i;
        });
        // Repeat the last key up to the end of the block; these scores are not used.
        for (; i < kKeys; ++i) keys[i] = keys[count - 1], values[i] = values[count - 1];
        for (int64_t first = 0; first < round_up(count, kPanel); first += kLanes) {
            float* panel = key_panels + first / kPanel * (kPairs<T> ? lanes : dim) * kPanel + first % kPanel;
            for (int64_t lane = 0; lane < lanes; lane += kLanes) {
                Vec m[kLanes];
                int64_t left = std::min<int64_t>(lanes - lane, kLanes);
                for (int i = 0; i < kLanes; ++i) {
                    const float* p = reinterpret_cast<const float*>(keys[first + i]) + lane;
                    m[i] = left == kLanes ? load(p) : load(p, int(left));
                }
                transpose(m);
                for (int64_t i = 0; i < left; ++i) {
                    if constexpr (sizeof(T) == 2 && !kPairs<T>) {
                        store(panel + 2 * (lane + i) * kPanel, low_bf16(as_bits(m[i])));
                        store(panel + (2 * (lane + i) + 1) * kPanel, high_bf16(as_bits(m[i])));
                    } else {
                        store(panel + (lane + i) * kPanel, m[i]);
                    }
                }
            }
        }
        if constexpr (kPairs<T>) return prepare_value_pairs(values, count, value_panels);
        for (int64_t d = 0; d < dim; d += kLanes) {
            float* panel = value_panels + d / kPanel * kKeys * kPanel + d % kPanel;
            int64_t left = std::min<int64_t>(dim - d, kLanes);
            for (int64_t i = 0; i < count; ++i) {
                const T* p = reinterpret_cast<const T*>(values[i]) + d;
                if (left == kLanes) {
                    store(panel + i * kPanel, load(p));
                } else {
                    for (int64_t j = 0; j < left; ++j) panel[i * kPanel + j] = to_float(p[j]);
                }
            }
        }
    }

    // Pack values into panels of bfloat16 pairs; a pair has the values of two successive keys.
    void prepare_value_pairs(const char* const* values, int64_t count, float* panels) const {
        const int64_t dim = shape_.dim;
        uint32_t* panel = reinterpret_cast<uint32_t*>(panels);
        for (int64_t d = 0; d < dim; d += kPanel, panel += kKeys / 2 * kPanel) {
            for (int64_t i = 0; i < count; i += 2) {
                uint32_t* to = panel + i / 2 * kPanel;
                const bf16 *a = reinterpret_cast<const bf16*>(values[i]) + d;
                const bf16 *b = reinterpret_cast<const bf16*>(values[i + 1]) + d;
                if (dim - d >= kPanel) {
                    Bits first, second;
                    load_pairs(a, b, first, second);
                    store_bits(to, first), store_bits(to + kLanes, second);
                } else {
                    for (int64_t j = 0; j < dim - d; ++j) to[j] = a[j] | uint32_t(b[j]) << 16;
                }
            }
        }
    }

    // Call visit(pool slot) for keys [begin, end) of a span.
    template <class Visit>
    [[gnu::always_inline]] void each_slot(const Span& span, int64_t begin, int64_t end, const Visit& visit) const {
        const int64_t size = shape_.page_size;
        for (int64_t page = begin / size, row = begin % size; begin < end; ++page, row = 0) {
            for (; row < size && begin < end; ++row, ++begin) visit(span.pages[page] * size + row);
        }
    }

    // The keys of a block that a tile computes. `begin` is a multiple of kKeys.
    struct Seen {
        int64_t begin, end;
        const float* bias;  // [rows, kMostKeys], 0 or -infinity for keys from `biased` on; null: all keys are seen
        int64_t biased;
    };

    Seen see(const Link& link, const Span& span, int64_t from, int64_t to, int64_t begin, int64_t count,
             Scratch& s) const {
        const Edge& edge = *link.edge;
        const int64_t first = link.from + from / group_, last = link.from + (to - 1) / group_;
        const auto [least, most] = limits(edge, first, last + 1);
        const auto [low, high] = hidden(edge, first, last + 1);
        Seen seen = {std::max<int64_t>(low - begin, 0) / kKeys * kKeys, std::min(most - begin, count), nullptr, 0};
        const bool hides = span.keep != nullptr || high > begin;
        if (!hides && least - begin >= round_up(seen.end, kPanel)) return seen;
        seen.biased = hides ? seen.begin : std::clamp<int64_t>(least - begin, 0, count) / kPanel * kPanel;
        float* out = s.bias.data();
        seen.bias = out;
        const int64_t padded = round_up(seen.end, kPanel);
        for (int64_t f = from; f < to; ++f, out += kMostKeys) {
            const int64_t keys = edge.visible == nullptr ? span.length : edge.visible[link.from + f / group_];
            const int64_t end = std::clamp<int64_t>(keys - begin, 0, count);
            const int64_t skip = edge.hidden == nullptr ? 0 : edge.hidden[link.from + f / group_] - begin;
            for (int64_t i = seen.biased; i < padded; ++i) out[i] = i < end && i >= skip ? 0 : kMinusInfinity;
            if (span.keep != nullptr) {
                for (int64_t i = seen.biased; i < end; ++i) out[i] = span.keep[begin + i] ? out[i] : kMinusInfinity;
            }
        }
        return seen;
    }

    // Attention of R rows of the scratch buffers, from `from` on, to the block in them.
    template <int R, bool Pairs>
    static void attend_tile(Attention& self, int64_t from, const Seen& seen, Scratch& s) {
        static constexpr auto kOnes = [] { std::array<float, R> ones; ones.fill(1); return ones; }();
        constexpr int64_t kTogether = Pairs ? 2 : 1;
        const int64_t wide = self.wide_, lanes = self.shape_.dim / kTogether;
        const float* q = s.q.data() + from * wide;
        float* scores = s.scores.data();
        for (int64_t first = seen.begin; first < seen.end; first += kPanel) {
            Tile<R> tile;
            clear<R>(tile);
            dot_block<R, Pairs>(tile, q, wide, s.keys.data() + first * lanes, lanes);
            const bool biased = seen.bias != nullptr && first >= seen.biased;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                if (biased) {
                    tile[r][0] = add(tile[r][0], load(seen.bias + r * kMostKeys + first));
                    tile[r][1] = add(tile[r][1], load(seen.bias + r * kMostKeys + first + kLanes));
                }
            }
            store<R>(scores + first, kScoreStride, tile);
            s.upcoming.fetch(s.fetches);
        }
        float decay[kLanes];
        float *tops = s.top.data() + from, *sums = s.sum.data() + from * kLanes;
        scores += seen.begin;
        weigh<R, Pairs>(scores, kScoreStride, round_up(seen.end - seen.begin, kPanel), tops, sums, decay);
        float* out = s.out.data() + from * wide;
        for (int64_t d = 0; d < wide; d += kPanel) {
            for (int64_t b = seen.begin; b < seen.end; b += kKeys) {
                Tile<R> tile;
                clear<R>(tile);
                const float* weights = scores + (b - seen.begin) / kTogether;
                const float* values = s.values.data() + (b * wide + d * kKeys) / kTogether;
                const int64_t count = std::min(kKeys, seen.end - b);
                dot_block<R, Pairs>(tile, weights, kScoreStride, values, (count + kTogether - 1) / kTogether);
                add_scaled<R>(out + d, wide, b == seen.begin ? decay : kOnes.data(), tile);
                s.upcoming.fetch(s.fetches);
            }
        }
    }

    template <int R, bool Pairs>
    [[gnu::always_inline]] static void dot_block(Tile<R>& tile, const float* rows, int64_t stride, const float* panel,
                                                 int64_t count) {
        const uint32_t* lanes = reinterpret_cast<const uint32_t*>(panel);
        if constexpr (Pairs) {
            dot_pairs<R, false>(tile, rows, stride, lanes, count);
        } else {
            dot_f32<R, false>(tile, rows, stride, lanes, count);
        }
    }

    // Turn scores [R, padded] into weights 2^(score - the row's top), as pairs if values are multiplied as pairs.
    // `padded` is a multiple of kPanel. Updates tops (whole numbers) and sums [R, kLanes]; sets decay [R], the factor
    // for earlier results. Not inline, because the compiler would spill registers to keep the caller's tile.
    template <int R, bool Pairs>
    [[gnu::noinline]] static void weigh(float* scores, int64_t stride, int64_t padded, float* tops, float* sums,
                                        float* decay) {
        Vec highest[kLanes];
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) {
            highest[r] = r < R ? load(scores + r * stride) : zero();
            for (int64_t i = kLanes; r < R && i < padded; i += kLanes) {
                highest[r] = max(highest[r], load(scores + r * stride + i));
            }
        }
        transpose(highest);
#pragma GCC unroll 4
        for (int n = kLanes / 2; n > 0; n /= 2) {
#pragma GCC unroll 8
            for (int i = 0; i < n; ++i) highest[i] = max(highest[i], highest[n + i]);
        }
        const Vec old = load(tops, R), top = max(old, round(highest[0]));
        store(tops, top, R);
        // If no key was seen so far, any finite base makes all weights 0.
        float bases[kLanes];
        store(bases, max(top, set1(-1e30f)));
        store(decay, exp2(old, load(bases)));
        for (int r = 0; r < R; ++r) {
            const Vec base = set1(bases[r]);
            Vec sum = mul(load(sums + r * kLanes), set1(decay[r]));
            for (int64_t block = 0; block < padded; block += kKeys) {
                Vec total = zero();
                for (int64_t i = block; i < std::min(block + kKeys, padded); i += kPanel) {
                    float* at = scores + r * stride + i;
                    Vec first = exp2(load(at), base), second = exp2(load(at + kLanes), base);
                    if constexpr (Pairs) {
                        store_bits(scores + r * stride + i / 2, to_pairs(first, second));
                    } else {
                        store(at, first), store(at + kLanes, second);
                    }
                    total = add(total, add(first, second));
                }
                sum = add(sum, total);
            }
            store(sums + r * kLanes, sum);
        }
    }

    using AttendTile = void (*)(Attention&, int64_t, const Seen&, Scratch&);
    using AttendFew = void (*)(Attention&, int64_t, const char*, const char*, int64_t, Scratch&);

    template <bool Pairs, int... R>
    static constexpr std::array<AttendTile, sizeof...(R)> tiles_of(std::integer_sequence<int, R...>) {
        return {attend_tile<R + 1, Pairs>...};
    }
    template <class T>
    static constexpr std::array<AttendFew, kFewRows> few_table = {attend_few<1, T>, attend_few<2, T>, attend_few<3, T>,
                                                                  attend_few<4, T>};

    const Shape shape_;
    const bool gives_pairs_;
    const int64_t group_;
    const int64_t wide_;  // dim, rounded up to whole panels
    const int64_t most_rows_;  // of a piece
    const Span* spans_ = nullptr;
    const Edge* edges_ = nullptr;
    int64_t num_edges_ = 0, num_rows_ = 0;
    bool merges_ = false;
    Chains chains_;
    std::vector<Link> links_;
    std::vector<Piece> pieces_;
    std::vector<int64_t> slot_;       // by row of a piece: its first partial result, counted from the row's first
    std::vector<int64_t> row_parts_;  // [num_rows + 1], index of each row's first partial result
    std::vector<uint8_t> begins_section_;  // whether a partial result is the first of its section
    Buffer<float> partials_;          // [parts, heads, partial_size()]
};

}  // namespace ramet
