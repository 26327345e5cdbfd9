// Eight 4x4 tiles side by side as arrays: the plain form of tiles_avx512.h and tiles_avx2.h.
#pragma once

#include "../../../core/types.h"

namespace nm {
namespace {

struct Tiles {
    static constexpr int kCount = 8;
    struct Scores {
        float lane[kCount];
    };
    struct Masks {
        uint32_t lane[kCount];
    };

    // One row: the magnitudes in the four columns of every tile; NaN counts as infinity.
    template <class T>
    static void columns(const T* w, Scores* column) {
        constexpr uint32_t infinity = 0x7f800000u;
        for (int j = 0; j < 4; ++j) {
            for (int i = 0; i < kCount; ++i) {
                const uint32_t bits = float_bits(to_float(w[4 * i + j])) & 0x7fffffffu;
                column[j].lane[i] = bits_float(bits < infinity ? bits : infinity);
            }
        }
    }

    static Scores plus(const Scores& a, const Scores& b) {
        Scores sum;
        for (int i = 0; i < kCount; ++i) sum.lane[i] = a.lane[i] + b.lane[i];
        return sum;
    }
    static Scores none() {
        Scores s;
        for (float& x : s.lane) x = -1.0f;
        return s;
    }

    // Where the score is better than the best so far, the mask is found.
    static void keep_better(const Scores& score, const Masks& mask, Scores& best, Masks& found) {
        for (int i = 0; i < kCount; ++i) {
            const bool better = score.lane[i] > best.lane[i];
            found.lane[i] = better ? mask.lane[i] : found.lane[i];
            best.lane[i] = better ? score.lane[i] : best.lane[i];
        }
    }
    static Masks all(uint32_t mask) {
        Masks m;
        for (uint32_t& x : m.lane) x = mask;
        return m;
    }

    // One row of all tiles as bools.
    static void flags(const Masks& found, int row, uint8_t* out) {
        for (int i = 0; i < 4 * kCount; ++i) out[i] = (found.lane[i / 4] >> (4 * row + i % 4)) & 1;
    }
};

}  // namespace
}  // namespace nm
