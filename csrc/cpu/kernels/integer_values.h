// Stored integers with a step as fp32 numbers, a row or a part of it at a time.
#pragma once

#include <algorithm>

#include "../kernels.h"
#include "scratch.h"
#include "simd/simd.h"

namespace nm {
namespace {

constexpr int kMostTokens = 16;  // that are multiplied at a time

inline int64_t stored_bytes(const Integers& w) { return w.bits == 8 ? w.kept : (w.kept + 1) / 2; }
inline const uint8_t* stored_row(const Integers& w, int64_t row) { return static_cast<const uint8_t*>(w.values) + row * stored_bytes(w); }

// A row of halves as bytes, from -8 to 7.
inline void unpack_halves(const uint8_t* row, int64_t count, int8_t* to) {
    for (int64_t i = 0; i < count / 2; ++i) {
        to[2 * i] = int8_t(int8_t(row[i] << 4) >> 4);
        to[2 * i + 1] = int8_t(int8_t(row[i]) >> 4);
    }
    if (count & 1) to[count - 1] = int8_t(int8_t(row[count / 2] << 4) >> 4);
}

// A row's weights, exact.
inline void decode_row(const Integers& w, int64_t row, float* to) {
    static thread_local Scratch room;
    const auto* from = reinterpret_cast<const int8_t*>(stored_row(w, row));
    if (w.bits == 4) {
        int8_t* bytes = room.at_least<int8_t>(w.kept);
        unpack_halves(stored_row(w, row), w.kept, bytes);
        from = bytes;
    }
    const int64_t run = w.kept / w.steps;
    for (int64_t s = 0; s < w.steps; ++s, from += run, to += run) {
        const float step = to_float(w.step[row * w.steps + s]);
        for (int64_t i = 0; i < run; ++i) to[i] = float(from[i]) * step;
    }
}

}  // namespace
}  // namespace nm
