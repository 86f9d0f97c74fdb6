// The spans and edges of an attention plan, and which rows read several spans one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace ramet {

// KV rows in the pool; see Span in runtime/batch.py.
struct Span {
    const int32_t* pages;
    int64_t length;
    const uint8_t* keep;  // [length], 0 for rows that no query sees; null: all rows are seen
    const float* turn;    // cos and sin [2, dim / 2] that rotate the queries by minus the shift; null: no shift
    int64_t position;     // position of row 0 in its sequence
};

// Query rows that attend to a span; see Edge in runtime/batch.py.
struct Edge {
    int64_t num_rows;
    int64_t span;
    const int32_t* rows;
    const int32_t* visible;  // [num_rows], end of the span's rows that each query sees; null: the span's length
    const int32_t* hidden;   // [num_rows], first of the span's rows that each query sees; null: 0
};

// Runs of rows that several edges read together, so that a piece of work can sum their spans one after the other, and no
// partial result is written for each. All edges of these rows have successive rows. None continues a sum that another
// edge begins: the chain would add it in another order.
class Chains {
  public:
    struct Run {
        int64_t first, last;  // rows of the plan, `last` exclusive
    };

    // How to cut chains into runs. A run is not cut along the keys, so it takes enough runs for all threads.
    struct Sizes {
        int64_t least, most;  // rows of a run; fewer are no chain, as others may read the same keys with them
        int64_t heads;        // pieces of a run
        int64_t least_pieces, wanted_pieces;
    };

    // `begins(edge)`: whether its sums do not continue those of another edge.
    template <class Begins>
    void find(const Edge* edges, int64_t num_edges, int64_t num_rows, const Sizes& sizes, const Begins& begins) {
        runs_.clear();
        std::vector<int64_t> count(num_rows);  // edges of a row
        std::vector<bool> ends(num_rows + 1), loose(num_rows);
        fits_.clear();
        for (int64_t e = 0; e < num_edges; ++e) {
            const Edge& edge = edges[e];
            fits_.push_back(are_adjacent(edge) && begins(edge));
            for (int64_t i = 0; i < edge.num_rows; ++i) {
                ++count[edge.rows[i]];
                if (!fits_[e]) loose[edge.rows[i]] = true;
            }
            if (fits_[e] && edge.num_rows > 0) ends[edge.rows[0] + edge.num_rows] = true;
        }
        std::vector<Run> chains;
        int64_t rows = 0;
        for (int64_t row = 0, next; row < num_rows; row = next) {
            bool several = count[row] > 1;
            for (next = row + 1; next < num_rows && !ends[next] && loose[next] == loose[row]; ++next) {
                several |= count[next] > 1;
            }
            if (loose[row] || !several || next - row < sizes.least) continue;
            chains.push_back({row, next});
            rows += next - row;
        }
        const int64_t most = std::clamp(rows * sizes.heads / sizes.wanted_pieces, sizes.least, sizes.most);
        for (const Run& chain : chains) {
            const int64_t size = chain.last - chain.first, parts = (size + most - 1) / most;
            for (int64_t i = 0; i < parts; ++i) {
                runs_.push_back({chain.first + i * size / parts, chain.first + (i + 1) * size / parts});
            }
        }
        if (int64_t(runs_.size()) * sizes.heads < sizes.least_pieces) runs_.clear();
        if (runs_.empty()) return;
        has_.assign(num_rows, false);
        for (const Run& run : runs_) std::fill(has_.begin() + run.first, has_.begin() + run.last, true);
        ids_.resize(num_rows);
        std::iota(ids_.begin(), ids_.end(), 0);
    }

    void clear() { runs_.clear(); }
    const std::vector<Run>& runs() const { return runs_; }
    bool has(int64_t row) const { return !runs_.empty() && has_[row]; }
    // The numbers of a run's rows.
    const int32_t* ids(const Run& run) const { return ids_.data() + run.first; }

    // The part of an edge, by its number, that a run has: rows [first, second) within the edge.
    std::pair<int64_t, int64_t> part(const Run& run, const Edge& edge, int64_t number) const {
        if (edge.num_rows == 0 || !fits_[number]) return {0, 0};
        const int64_t start = edge.rows[0];
        return {std::max(run.first - start, int64_t(0)), std::min(run.last - start, edge.num_rows)};
    }

  private:
    static bool are_adjacent(const Edge& edge) {
        for (int64_t i = 1; i < edge.num_rows; ++i) {
            if (edge.rows[i] != edge.rows[0] + i) return false;
        }
        return true;
    }

    std::vector<Run> runs_;
    std::vector<bool> has_, fits_;  // [num_rows], if there are runs; [num_edges]
    std::vector<int32_t> ids_;      // 0 to num_rows - 1, if there are runs
};

}  // namespace ramet
