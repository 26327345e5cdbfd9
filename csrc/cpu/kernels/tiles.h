// The best 2:4 masks of kLanes 4x4 tiles at once, a lane each, by the rules of core/transposable.h: the same 90 scores in
// the same order, so that ties are decided in the same way.
#pragma once

#include "../../core/transposable.h"
#include "simd/simd.h"

namespace nm {
namespace {

constexpr int kMasks = 90;

// Two pairs of columns each for the upper and the lower two rows, as 6 * first + second.
struct TileMask {
    uint8_t upper, lower;
    uint16_t bits;
};

struct TileMasks {
    TileMask all[kMasks];
    constexpr TileMasks() : all() {
        constexpr uint32_t pairs[6] = {0x3, 0x5, 0x9, 0x6, 0xa, 0xc};
        int count = 0;
        for (int i = 0; i < 6 * 6 * 6 * 6; ++i) {
            const uint32_t p0 = pairs[i / 216], p1 = pairs[i / 36 % 6], p2 = pairs[i / 6 % 6], p3 = pairs[i % 6];
            const uint32_t odd = p0 ^ p1 ^ p2 ^ p3, any = p0 | p1 | p2 | p3, every = p0 & p1 & p2 & p3;
            if (odd != 0 || any != 0xf || every != 0) continue;  // columns hold 1 or 3, 0, or 4
            all[count++] = {uint8_t(i / 36), uint8_t(i % 36), uint16_t(p0 | (p1 << 4) | (p2 << 8) | (p3 << 12))};
        }
    }
};

constexpr TileMasks kTileMasks;

// The sums over the pairs of columns (0,1) (0,2) (0,3) (1,2) (1,3) (2,3) in one row; NaN counts as infinity.
template <class T>
NM_INLINE void pair_sums(const T* w, Floats* sums) {
    Floats column[4];
    for (int i = 0; i < 4; ++i) column[i] = smaller_magnitude(magnitude(widened(w + kLanes * i)), splat(bits_float(0x7f800000u)));
    transpose_quads(column, column);
    for (int j = 0; j < 4; ++j) {
        for (int k = j + 1; k < 4; ++k) *sums++ = column[j] + column[k];
    }
}

// The sums over two rows, `stride` elements apart, for all pairs of pairs.
template <class T>
NM_INLINE void row_sums(const T* w, int64_t stride, Floats* sums) {
    Floats first[6], second[6];
    pair_sums(w, first);
    pair_sums(w + stride, second);
    for (int i = 0; i < 6; ++i) {
        for (int j = 0; j < 6; ++j) sums[6 * i + j] = first[i] + second[j];
    }
}

// kLanes tiles side by side. Both halves of the masks are tried at a time, to wait less for each other; a mask of
// the later half wins only when strictly better.
template <class T>
Uints best_masks(const T* w, int64_t stride) {
    Floats upper[36], lower[36], best[2];
    Uints found[2];
    row_sums(w, stride, upper);
    row_sums(w + 2 * stride, stride, lower);
    for (int i = 0; i < kMasks / 2; ++i) {
        for (int half = 0; half < 2; ++half) {
            const TileMask& mask = kTileMasks.all[i + half * (kMasks / 2)];
            const Floats score = upper[mask.upper] + lower[mask.lower];
            const Uints bits = splat(uint32_t(mask.bits));
            found[half] = i == 0 ? bits : choose(below(best[half], score), bits, found[half]);
            best[half] = i == 0 ? score : maximum(score, best[half]);
        }
    }
    return in_tile_order(choose(below(best[0], best[1]), found[1], found[0]));
}

// One row of all tiles as bools: a tile's four bits become the lowest bits of four bytes.
inline void row_flags(Uints masks, int row, uint8_t* out) { store_as(out, (((masks >> (4 * row)) & 0xfu) * 0x204081u) & 0x01010101u); }

}  // namespace
}  // namespace nm
