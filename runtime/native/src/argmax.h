// Greedy sampling: the first of the highest logits of each row.
#pragma once

#include <algorithm>

#include "team.h"
#include "vec.h"

namespace ramet {

inline int64_t argmax(const float* x, int64_t n) {
    Vec tops[4] = {set1(kMinusInfinity), set1(kMinusInfinity), set1(kMinusInfinity), set1(kMinusInfinity)};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int j = 0; j < 4; ++j) tops[j] = max(tops[j], load(x + i + j * kLanes));
    }
    float top = reduce_max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    for (; i < n; ++i) top = std::max(top, x[i]);
    int64_t found = std::find(x, x + n, top) - x;
    return found < n ? found : 0;  // not found: nothing but NaN
}

// One row [n] after the other, shared out among the threads.
inline void argmax(Team& team, const float* rows, int64_t num_rows, int64_t n, int64_t* out) {
    team.run([&](int) {
        for (int64_t row; (row = team.take()) < num_rows;) out[row] = argmax(rows + row * n, n);
    });
}

}  // namespace ramet
