// The best of the 90 masks of a 4x4 tile that keep two in every row and every column (Hubara et al., NeurIPS 2021).
//
//   score = (r0 + r1) + (r2 + r3),  r_i = |w_ij| + |w_ik| over the pair (j, k) that row i keeps, j < k, in fp32
//
// Rows take the pairs (0,1) (0,2) (0,3) (1,2) (1,3) (2,3) in this order, numbered 0 to 5; the masks are tried in
// lexicographic order of their four pairs and a later one wins only when strictly better. A NaN magnitude counts as
// infinity.
//
// Not all 90 are tried. Pairs i and j of the upper rows leave few choices for rows 2 and 3: one if i = j; the pairs 5-j and
// 5-i in either order if i and j share a column (5-i are the columns that i leaves); and any of the six with its opposite
// if j = 5-i. Rounded addition is monotone, so the best score over i and j is, to the bit, that of the largest lower sum,
// and the first best mask begins with the first i and j that reach the best score. Then their lower sums are tried in
// order, because a smaller one may reach it too.
//
// Scores are compared as integers, which have the order of non-negative floats, with NaN above infinity. The best is
// clamped to infinity, so a NaN counts as infinity, as in the definition.
//
// Everything stays in registers without branches: all loops unroll, and no index depends on data. A tile takes 161
// additions and 108 other instructions on sm_90a, 125 on sm_80, in 47 registers (nvcc 13.0, 2026-11-21).
#pragma once

#include "types.h"

namespace nm {

namespace tile {

// The sums of the pairs of one row.
struct Sums {
    float of[6];
};

NM_HD Sums pair_sums(const float* w) {
    const float a = magnitude(w[0]), b = magnitude(w[1]), c = magnitude(w[2]), d = magnitude(w[3]);
    return {{a + b, a + c, a + d, b + c, b + d, c + d}};
}

NM_HD int order(float score) { return int(float_bits(score)); }

NM_HD float larger(float a, float b) { return order(a) > order(b) ? a : b; }

NM_HD float largest(const float* x) { return larger(larger(larger(x[0], x[1]), larger(x[2], x[3])), larger(x[4], x[5])); }

// The first of six scores that reaches the best; the last if no other does.
struct First {
    bool hit[5];

    template <class T>
    NM_HD T of(const T* x) const {
        T found = x[5];
        NM_UNROLL
        for (int i = 4; i >= 0; --i) found = hit[i] ? x[i] : found;
        return found;
    }
};

NM_HD First first_reaching(const float* scores, int best) {
    First first;
    NM_UNROLL
    for (int i = 0; i < 5; ++i) first.hit[i] = order(scores[i]) >= best;
    return first;
}

}  // namespace tile

// The mask of a tile: bit j of row[i] is column j of row i.
struct TileRows {
    uint32_t row[4];
};

// `w`: the 16 numbers of the tile, row-major; only magnitudes matter.
NM_HD TileRows transposable_rows(const float* w) {
    using namespace tile;
    constexpr uint32_t pairs[6] = {0x3, 0x5, 0x9, 0x6, 0xa, 0xc}, left[6] = {0xc, 0xa, 0x6, 0x9, 0x5, 0x3};
    const Sums r0 = pair_sums(w), r1 = pair_sums(w + 4), r2 = pair_sums(w + 8), r3 = pair_sums(w + 12);
    float p[6], s[6], opposite[6];  // of rows 2 and 3 by the pair they do not keep; both, by that of row 2
    NM_UNROLL
    for (int i = 0; i < 6; ++i) {
        p[i] = r2.of[5 - i];
        s[i] = r3.of[5 - i];
    }
    NM_UNROLL
    for (int i = 0; i < 6; ++i) opposite[i] = p[i] + s[5 - i];
    const float any = largest(opposite);
    float lower[6][6], row_best[6];
    NM_UNROLL
    for (int i = 0; i < 6; ++i) {
        NM_UNROLL
        for (int j = i; j < 6; ++j) lower[i][j] = lower[j][i] = i == j ? p[i] + s[i] : i + j == 5 ? any : larger(p[i] + s[j], p[j] + s[i]);
    }
    NM_UNROLL
    for (int i = 0; i < 6; ++i) {
        float scores[6];
        NM_UNROLL
        for (int j = 0; j < 6; ++j) scores[j] = (r0.of[i] + r1.of[j]) + lower[i][j];
        row_best[i] = largest(scores);
    }
    constexpr int infinity = 0x7f800000;
    const int most = order(largest(row_best)), best = most > infinity ? infinity : most;

    const First first = first_reaching(row_best, best);
    const uint32_t m0 = first.of(pairs);
    const float a = first.of(r0.of), pa = first.of(p), sa = first.of(s);
    float scores[6], upper[6], there[6], back[6];
    NM_UNROLL
    for (int j = 0; j < 6; ++j) {
        upper[j] = a + r1.of[j];
        there[j] = pa + s[j];
        back[j] = p[j] + sa;
    }
    NM_UNROLL
    for (int j = 0; j < 5; ++j) scores[j] = upper[j] + (m0 == pairs[5 - j] ? any : larger(there[j], back[j]));
    const First second = first_reaching(scores, best);
    const uint32_t m1 = second.of(pairs);
    const float both = second.of(upper), x = second.of(there), y = second.of(back);
    // of two pairs that share a column the later one is the larger number
    const uint32_t high = m0 > m1 ? m0 : m1, low = m0 > m1 ? m1 : m0;
    const bool reached = order(both + (m0 > m1 ? x : y)) >= best;
    float any_scores[6];
    NM_UNROLL
    for (int i = 0; i < 6; ++i) any_scores[i] = both + opposite[5 - i];
    const uint32_t free = first_reaching(any_scores, best).of(left);
    const uint32_t unused = (m0 ^ m1) == 0xfu ? free : reached ? high : low;
    const uint32_t m2 = unused ^ 0xfu;
    return {{m0, m1, m2, m0 ^ m1 ^ m2}};
}

// The same as one integer, bit 4*row + column.
NM_HD uint32_t transposable_2_4(const float* w) {
    const TileRows mask = transposable_rows(w);
    return mask.row[0] + mask.row[1] * 16u + mask.row[2] * 256u + mask.row[3] * 4096u;
}

}  // namespace nm
