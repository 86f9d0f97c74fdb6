// Packed weight matrices, in the layout of the micro-kernels.
#pragma once

#include <algorithm>
#include <cmath>

#include "team.h"
#include "vec.h"

namespace ramet {

enum class Storage : int64_t { kFloat32, kBfloat16, kCodes };

constexpr int64_t kChunk = 256;  // number of k whose codes and scales are stored together

// Weights [n, k] in panels of kPanel output columns, stored one after the other. A panel has all k of its columns.
//
// float32: for each k, kPanel weights. bfloat16: for each pair of k, kPanel 32-bit lanes with k in the low half and
// k + 1 in the high half, as the dot product of bfloat16 pairs (vdpbf16ps) needs. Padding (columns beyond n, a k after
// the last) is zero.
//
// Codes are unsigned integers q of `bits` bits. Each `group` of k shares a scale s and, with minima, a minimum m. A
// weight is s q + m, or s (q - 2^(bits - 1)) without minima. MXFP4's floats of 4 bits stand for q - 16 from -12 to 12. k is
// padded to a multiple of 32. Each chunk of at most kChunk k consists of:
// - with 8 bits: for each four k, kPanel 32-bit lanes of four codes, as the dot product of bytes (vpdpbusd) needs;
//   with fewer: for each eight k, kPanel lanes of the codes' low four bits: the first four k in the low halves of the
//   bytes, the other four k in the high halves;
// - further bits, above the fourth: with 5 bits, for each 16 k, kLanes lanes; bit j of a byte belongs to the code in that
//   byte of the j-th vector of these 16 k, in the order that `unpack_codes` gives: of each eight k, the first vector's
//   first and other four k, then the second vector's; with 6 bits, for each eight k, kLanes lanes, likewise with two bits
//   of each of the four vectors;
// - for each group: kPanel scales, then kPanel minima, as halves (16-bit floats);
// - nested scales and minima are signed bytes instead, and factors follow them: kPanel halves for all scales of the
//   chunk, then kPanel halves for all minima.
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
    int64_t bits;  // of codes
    int64_t group;
    int64_t has_minima;
    int64_t is_nested;
    int64_t is_float;  // codes are MXFP4's floats

    // The bit of a code's number that is its zero, without minima.
    int64_t zero_bit() const { return is_float ? 4 : bits - 1; }
    int64_t panels() const {
        return is_paired ? (n / 2 + kLanes - 1) / kLanes : (n + kPanel - 1) / kPanel;
    }
    // Bytes of `count` codes of each column, with their scales.
    int64_t chunk_bytes(int64_t count) const {
        const int64_t scales = count / group * (1 + has_minima) * (is_nested ? 1 : 2) + is_nested * (1 + has_minima) * 2;
        return (count * bits / 8 + scales) * kPanel;
    }
    int64_t panel_bytes() const {
        if (storage == Storage::kCodes) {
            const int64_t rest = round_up(k, 32) % kChunk;
            return k / kChunk * chunk_bytes(kChunk) + (rest ? chunk_bytes(rest) : 0);
        }
        return (storage == Storage::kBfloat16 ? (k + 1) / 2 : k) * kPanel * 4;
    }
    int64_t bytes() const { return panels() * panel_bytes(); }
    const uint32_t* panel(int64_t p) const {
        return reinterpret_cast<const uint32_t*>(static_cast<const char*>(data) + p * panel_bytes());
    }

    // The row of the source weights for a column of the panels; -1: padding.
    int64_t source_row(int64_t p, int64_t column) const {
        if (!is_paired) return p * kPanel + column < n ? p * kPanel + column : -1;
        int64_t i = p * kLanes + column % kLanes;
        return i < n / 2 ? i + column / kLanes * (n / 2) : -1;
    }
};

// Read a column of a panel of codes, as float32 [k].
void unpack_column(const Matrix& w, int64_t panel, int64_t column, float* out);

// Pack row-major weights [n, k] into `w`, which holds floats of the same dtype.
inline void pack(Team& team, const Matrix& w, const void* source) {
    auto pack_panel = [&](int64_t p) {
        uint32_t* out = const_cast<uint32_t*>(w.panel(p));
        for (int64_t column = 0; column < kPanel; ++column) {
            int64_t row = w.source_row(p, column);
            int64_t lanes = w.panel_bytes() / (4 * kPanel);
            if (row < 0) {
                for (int64_t i = 0; i < lanes; ++i) out[i * kPanel + column] = 0;
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
    if (w.storage == Storage::kCodes) {
        unpack_column(w, row / kPanel, row % kPanel, out);
    } else if (w.storage == Storage::kBfloat16) {
        for (int64_t i = 0; i < w.k; ++i) out[i] = to_float(bf16(in[i / 2 * kPanel] >> (i % 2 * 16)));
    } else {
        for (int64_t i = 0; i < w.k; ++i) out[i] = std::bit_cast<float>(in[i * kPanel]);
    }
}

}  // namespace ramet
