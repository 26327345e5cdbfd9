// Stored integers with a step as fp32 numbers, a row or a part of it at a time.
#pragma once

#include <algorithm>

#include "../kernels.h"
#include "simd/simd.h"

namespace nm {
namespace {

constexpr int kMostTokens = 16;  // that are multiplied at a time

inline int64_t stored_bytes(const Integers& w) { return w.bits == 8 ? w.kept : (w.kept + 1) / 2; }
inline const uint8_t* stored_row(const Integers& w, int64_t row) { return static_cast<const uint8_t*>(w.values) + row * stored_bytes(w); }

// The integer at place k of a row of halves, from -8 to 7.
inline int half_at(const uint8_t* row, int64_t k) { return int8_t(row[k >> 1] << (k & 1 ? 0 : 4)) >> 4; }

// Places [begin, end) of a row, times one step.
inline void decode_run(const uint8_t* row, int bits, int64_t begin, int64_t end, float step, float* to) {
    if (bits == 8) {
        const int8_t* from = reinterpret_cast<const int8_t*>(row) + begin;
        for (int64_t i = 0; i < end - begin; ++i) to[i] = float(from[i]) * step;
        return;
    }
    if (begin < end && begin & 1) *to++ = float(half_at(row, begin++)) * step;
    const uint8_t* from = row + begin / 2;
    const int64_t pairs = (end - begin) / 2;
    for (int64_t i = 0; i < pairs; ++i) {
        to[2 * i] = float(int8_t(from[i] << 4) >> 4) * step;
        to[2 * i + 1] = float(int8_t(from[i]) >> 4) * step;
    }
    if ((end - begin) & 1) to[2 * pairs] = float(half_at(row, end - 1)) * step;
}

// A row's weights, exact.
inline void decode_row(const Integers& w, int64_t row, float* to) {
    const int64_t run = w.kept / w.steps;
    for (int64_t s = 0; s < w.steps; ++s) {
        decode_run(stored_row(w, row), w.bits, s * run, (s + 1) * run, to_float(w.step[row * w.steps + s]), to + s * run);
    }
}

}  // namespace
}  // namespace nm
