// Greedy sampling: the index of the first highest logit of each row, or of its first NaN, as in torch.
#pragma once

#include <algorithm>

#include "team.h"
#include "vec.h"

namespace ramet {

inline int64_t argmax(const float* x, int64_t n) {
    Vec tops[4] = {set1(kMinusInfinity), set1(kMinusInfinity), set1(kMinusInfinity), set1(kMinusInfinity)};
    Vec sums[4] = {zero(), zero(), zero(), zero()};  // NaN if there is a NaN
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int j = 0; j < 4; ++j) {
            Vec v = load(x + i + j * kLanes);
            tops[j] = max(tops[j], v), sums[j] = add(sums[j], v);
        }
    }
    float top = reduce_max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    float sum = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    for (; i < n; ++i) top = std::max(top, x[i]), sum += x[i];
    if (sum != sum) {
        const float* nan = std::find_if(x, x + n, [](float v) { return v != v; });
        if (nan < x + n) return nan - x;
    }
    return std::find(x, x + n, top) - x;
}

// Each thread takes one row [n] after the other.
inline void argmax(Team& team, const float* rows, int64_t num_rows, int64_t n, int64_t* out) {
    team.run([&](int) {
        for (int64_t row; (row = team.take()) < num_rows;) out[row] = argmax(rows + row * n, n);
    });
}

}  // namespace ramet
