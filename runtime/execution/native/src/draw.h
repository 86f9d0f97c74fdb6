// Drawing of tokens, as `draw` in runtime/sampling/sampler.py does with torch, without writing the distribution.
#pragma once

#include "argmax.h"
#include "buffer.h"

namespace ramet {

constexpr int64_t kBlock = 64;  // _BLOCK there

// The index of the largest weight / noise; noise of 0 counts as little.
inline int64_t win_race(const float* weights, const float* noise, int64_t n) {
    int64_t best = 0;
    float most = -1;
    for (int64_t i = 0; i < n; ++i) {
        const float value = weights[i] / std::max(noise[i], 1e-30f);
        if (value > most) most = value, best = i;
    }
    return best;
}

// weights [kBlock] = e^((x - top) / divisor), 0 behind the last of `count`. Returns their sum.
inline float weigh(const float* x, int64_t count, float top, float divisor, float* weights) {
    const Vec tops = set1(top), factor = set1(kLog2E / divisor);
    alignas(64) float last[kBlock];
    if (count < kBlock) {
        std::fill_n(std::copy_n(x, count, last), kBlock - count, kMinusInfinity);
        x = last;
    }
    Vec sum = zero();
    for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Vec weight = exp2(mul(sub(load(x + i), tops), factor), zero());
        sum = add(sum, weight);
        store(weights + i, weight);
    }
    return reduce_add(sum);
}

// A token of logits [n]: first a block, then a token in it. -1 if the logits give no distribution. `noise`: exponential,
// [number of blocks + kBlock]. `sums`: [number of blocks].
inline int64_t draw(const float* x, int64_t n, float divisor, const float* noise, float* sums) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    const float top = x[argmax(x, n)];
    alignas(64) float weights[kBlock];
    auto weigh_block = [&](int64_t b) {
        return weigh(x + b * kBlock, std::min(kBlock, n - b * kBlock), top, divisor, weights);
    };
    for (int64_t b = 0; b < blocks; ++b) sums[b] = weigh_block(b);
    const int64_t block = win_race(sums, noise, blocks);
    if (!(weigh_block(block) > 0)) return -1;
    return block * kBlock + win_race(weights, noise + blocks, kBlock);
}

// Each thread takes one row [n] after the other.
inline void draw(Team& team, const float* rows, int64_t num_rows, int64_t n, const float* divisors, const float* noise,
                 int64_t* out) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    team.run([&](int) {
        static thread_local Buffer<float> room;
        float* sums = room.reserve(blocks);
        for (int64_t row; (row = team.take()) < num_rows;) {
            out[row] = draw(rows + row * n, n, divisors[row], noise + row * (blocks + kBlock), sums);
        }
    });
}

}  // namespace ramet
