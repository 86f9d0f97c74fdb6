// A weight matrix as the micro-kernels read it.
#pragma once

#include <algorithm>

#include "team.h"
#include "vec.h"

namespace ramet {

// [n, k] weights in panels of kPanel output columns, one contiguous stream: all k of the first panel, then the next.
//
// float32: for each k, the panel's kPanel weights. bfloat16: for each pair of k, kPanel 32-bit lanes with k in the low
// half and k + 1 in the high half; this is what the dot product of bfloat16 pairs (vdpbf16ps) takes, too. Columns
// beyond n and a k beyond an odd one are zero.
//
// A paired matrix holds two of n / 2 columns (gate and up): a panel's first vector are columns of the one, its second
// the same columns of the other, so that both results meet in registers.
struct Matrix {
    void* data;         // `bytes(...)` long, 64-byte aligned
    const float* bias;  // [panels * kPanel] in the order of the panels; null: none
    int64_t n;
    int64_t k;
    int64_t is_bf16;
    int64_t is_paired;

    int64_t panels() const {
        return is_paired ? (n / 2 + kLanes - 1) / kLanes : (n + kPanel - 1) / kPanel;
    }
    // 32-bit lanes that one panel takes.
    int64_t panel_lanes() const { return (is_bf16 ? (k + 1) / 2 : k) * kPanel; }
    int64_t bytes() const { return panels() * panel_lanes() * 4; }
    const uint32_t* panel(int64_t p) const { return static_cast<const uint32_t*>(data) + p * panel_lanes(); }

    // The source row of a panel's column, -1 for padding.
    int64_t source_row(int64_t p, int64_t column) const {
        if (!is_paired) return p * kPanel + column < n ? p * kPanel + column : -1;
        int64_t i = p * kLanes + column % kLanes;
        return i < n / 2 ? i + column / kLanes * (n / 2) : -1;
    }
};

// Fill `w` from row-major weights [n, k] of its own dtype.
inline void pack(Team& team, const Matrix& w, const void* source) {
    auto pack_panel = [&](int64_t p) {
        uint32_t* out = const_cast<uint32_t*>(w.panel(p));
        for (int64_t column = 0; column < kPanel; ++column) {
            int64_t row = w.source_row(p, column);
            int64_t lanes = w.panel_lanes() / kPanel;
            if (row < 0) {
                for (int64_t i = 0; i < lanes; ++i) out[i * kPanel + column] = 0;
            } else if (w.is_bf16) {
                const bf16* in = static_cast<const bf16*>(source) + row * w.k;
                for (int64_t i = 0; i < lanes; ++i) {
                    uint32_t high = 2 * i + 1 < w.k ? in[2 * i + 1] : 0;
                    out[i * kPanel + column] = in[2 * i] | high << 16;
                }
            } else {
                const uint32_t* in = static_cast<const uint32_t*>(source) + row * w.k;
                for (int64_t i = 0; i < lanes; ++i) out[i * kPanel + column] = in[i];
            }
        }
    };
    team.run([&](int) {
        for (int64_t p; (p = team.take()) < w.panels();) pack_panel(p);
    });
}

// Read row `row` of an unpaired matrix back, as float32 [k]: the embedding of a model that ties it to its head.
inline void unpack_row(const Matrix& w, int64_t row, float* out) {
    const uint32_t* in = w.panel(row / kPanel) + row % kPanel;
    if (w.is_bf16) {
        for (int64_t i = 0; i < w.k; ++i) out[i] = to_float(bf16(in[i / 2 * kPanel] >> (i % 2 * 16)));
    } else {
        for (int64_t i = 0; i < w.k; ++i) out[i] = std::bit_cast<float>(in[i * kPanel]);
    }
}

}  // namespace ramet
