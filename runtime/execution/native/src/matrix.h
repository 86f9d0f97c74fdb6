// Packed weight matrices, in the layout of the micro-kernels.
#pragma once

#include <algorithm>
#include <cmath>

#include "team.h"
#include "vec.h"

namespace ramet {

enum class Storage : int64_t { kFloat32, kBfloat16, kInt8 };

constexpr int64_t kGroup = 64;  // number of 8-bit values that share a scale

constexpr int64_t groups(int64_t k) { return (k + kGroup - 1) / kGroup; }

// Weights [n, k] in panels of kPanel output columns, stored one after the other. A panel has all k of its columns.
//
// float32: for each k, kPanel weights. bfloat16: for each pair of k, kPanel 32-bit lanes with k in the low half and
// k + 1 in the high half, as the dot product of bfloat16 pairs (vdpbf16ps) needs. int8: for each four k, kPanel 32-bit
// lanes of four bytes that mean scale * (byte - 128), as the dot product of bytes (vpdpbusd) needs, and after each
// kGroup of k kPanel scales. Padding (columns beyond n, a k after the last) is zero.
//
// A paired matrix consists of two matrices of n / 2 columns (gate and up). The first vector of a panel has columns of
// gate, the second vector the same columns of up, so that both results are in registers together.
struct Matrix {
    void* data;         // `bytes(...)` long, 64-byte aligned
    const float* bias;  // [panels * kPanel] in the order of the panels; null: none
    int64_t n;
    int64_t k;
    Storage storage;
    int64_t is_paired;

    int64_t panels() const {
        return is_paired ? (n / 2 + kLanes - 1) / kLanes : (n + kPanel - 1) / kPanel;
    }
    // Number of 32-bit lanes in a panel.
    int64_t panel_lanes() const {
        if (storage == Storage::kInt8) return ((k + 3) / 4 + groups(k)) * kPanel;
        return (storage == Storage::kBfloat16 ? (k + 1) / 2 : k) * kPanel;
    }
    int64_t bytes() const { return panels() * panel_lanes() * 4; }
    const uint32_t* panel(int64_t p) const { return static_cast<const uint32_t*>(data) + p * panel_lanes(); }

    // The row of the source weights for a column of the panels; -1: padding.
    int64_t source_row(int64_t p, int64_t column) const {
        if (!is_paired) return p * kPanel + column < n ? p * kPanel + column : -1;
        int64_t i = p * kLanes + column % kLanes;
        return i < n / 2 ? i + column / kLanes * (n / 2) : -1;
    }
};

// Quantise one column of an int8 panel from its k weights. The largest value of each group becomes 127.
inline void pack_int8(const float* in, int64_t k, uint32_t* out) {
    for (int64_t from = 0; from < k; from += kGroup) {
        const int64_t count = std::min(kGroup, k - from);
        float most = 0;
        for (int64_t i = 0; i < count; ++i) most = std::max(most, std::abs(in[from + i]));
        const float inverse = most > 0 ? 127 / most : 0;
        for (int64_t i = 0; i < count; i += 4, out += kPanel) {
            uint32_t lane = 0;
            for (int64_t j = 0; j < 4; ++j) {
                float x = i + j < count ? in[from + i + j] * inverse : 0;
                lane |= uint32_t(std::lrint(x) + 128) << (8 * j);
            }
            *out = lane;
        }
        *out = std::bit_cast<uint32_t>(most / 127);
        out += kPanel;
    }
}

// Pack row-major weights [n, k] into `w`. They have the dtype of `w`, or float32 for int8.
inline void pack(Team& team, const Matrix& w, const void* source) {
    auto pack_panel = [&](int64_t p) {
        uint32_t* out = const_cast<uint32_t*>(w.panel(p));
        for (int64_t column = 0; column < kPanel; ++column) {
            int64_t row = w.source_row(p, column);
            int64_t lanes = w.panel_lanes() / kPanel;
            if (row < 0) {
                for (int64_t i = 0; i < lanes; ++i) out[i * kPanel + column] = 0;
            } else if (w.storage == Storage::kInt8) {
                pack_int8(static_cast<const float*>(source) + row * w.k, w.k, out + column);
            } else if (w.storage == Storage::kBfloat16) {
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

// Read row `row` of an unpaired matrix as float32 [k]: an embedding that is tied to the head.
inline void unpack_row(const Matrix& w, int64_t row, float* out) {
    const uint32_t* in = w.panel(row / kPanel) + row % kPanel;
    if (w.storage == Storage::kInt8) {
        for (int64_t from = 0; from < w.k; from += kGroup) {
            const int64_t count = std::min(kGroup, w.k - from), lanes = (count + 3) / 4;
            const float scale = std::bit_cast<float>(in[lanes * kPanel]);
            for (int64_t i = 0; i < count; ++i) {
                out[from + i] = scale * float(int(in[i / 4 * kPanel] >> (i % 4 * 8) & 255) - 128);
            }
            in += (lanes + 1) * kPanel;
        }
    } else if (w.storage == Storage::kBfloat16) {
        for (int64_t i = 0; i < w.k; ++i) out[i] = to_float(bf16(in[i / 2 * kPanel] >> (i % 2 * 16)));
    } else {
        for (int64_t i = 0; i < w.k; ++i) out[i] = std::bit_cast<float>(in[i * kPanel]);
    }
}

}  // namespace ramet
