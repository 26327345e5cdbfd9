// The best of the 90 masks of a 4x4 tile that keep two in every row and every column (Hubara et al., NeurIPS 2021).
//
//   score = (r0 + r1) + (r2 + r3),  r_i = |w_ij| + |w_ik| over the pair (j, k) that row i keeps, j < k, in fp32
//
// Rows take the pairs (0,1) (0,2) (0,3) (1,2) (1,3) (2,3) in this order; the masks are tried in lexicographic order of
// their four pairs and a later one wins only when strictly better. A NaN magnitude counts as infinity.
#pragma once

#include "types.h"

namespace nm {

// `a`: the 16 magnitudes, row-major. Returns the mask, bit 4*row + column.
NM_HD uint32_t transposable_2_4(const float* a) {
    const uint32_t pairs[6] = {0x3, 0x5, 0x9, 0x6, 0xa, 0xc};
    float score[4][16];
    for (int row = 0; row < 4; ++row) {
        float v[4];
        for (int j = 0; j < 4; ++j) v[j] = is_nan(a[4 * row + j]) ? bits_float(0x7f800000u) : a[4 * row + j];
        score[row][0x3] = v[0] + v[1];
        score[row][0x5] = v[0] + v[2];
        score[row][0x9] = v[0] + v[3];
        score[row][0x6] = v[1] + v[2];
        score[row][0xa] = v[1] + v[3];
        score[row][0xc] = v[2] + v[3];
    }
    float best = -1.0f;
    uint32_t found = 0;
    for (uint32_t p0 : pairs) {
        for (uint32_t p1 : pairs) {
            const float upper = score[0][p0] + score[1][p1];
            for (uint32_t p2 : pairs) {
                // three rows leave one mask for the last, if no column is full thrice over or still empty
                const uint32_t once = p0 | p1 | p2, twice = (p0 & p1) | (p0 & p2) | (p1 & p2);
                if ((p0 & p1 & p2) != 0 || once != 0xf) continue;
                const uint32_t p3 = 0xf & ~twice;
                const float total = upper + (score[2][p2] + score[3][p3]);
                if (total > best) {
                    best = total;
                    found = p0 | (p1 << 4) | (p2 << 8) | (p3 << 12);
                }
            }
        }
    }
    return found;
}

}  // namespace nm
