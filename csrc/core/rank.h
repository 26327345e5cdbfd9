// The N:M mask of one group: keep the n largest magnitudes, ties keep the lower index.
//
//   rank_i = #{ j : key_j > key_i, or key_j == key_i and j < i };   kept iff rank_i < n
//
// Exactly n are kept, also in an all-zero group. Keys come from Key<T>::of, so NaN ranks above everything.
#pragma once

#include "types.h"

namespace nm {

// The n-th largest key (n = 1 is the largest), bit by bit from the top, without sorting or scratch memory.
NM_HD uint32_t nth_key(const uint32_t* keys, int m, int n, int bits) {
    uint32_t found = 0;
    for (int bit = bits - 1; bit >= 0; --bit) {
        const uint32_t candidate = found | (1u << bit);
        int at_least = 0;
        for (int i = 0; i < m; ++i) at_least += keys[i] >= candidate;
        if (at_least >= n) found = candidate;
    }
    return found;
}

NM_HD void mask_by_rank(const uint32_t* keys, int n, int m, uint8_t* keep) {
    for (int i = 0; i < m; ++i) {
        int rank = 0;
        for (int j = 0; j < i; ++j) rank += keys[j] >= keys[i];
        for (int j = i + 1; j < m; ++j) rank += keys[j] > keys[i];
        keep[i] = rank < n;
    }
}

NM_HD void mask_of_largest(const uint32_t* keys, int m, uint8_t* keep) {
    uint32_t largest = keys[0];
    for (int i = 1; i < m; ++i) largest = keys[i] > largest ? keys[i] : largest;
    uint32_t sought = 1;
    for (int i = 0; i < m; ++i) {
        const uint32_t found = sought & (keys[i] == largest);
        keep[i] = uint8_t(found);
        sought ^= found;
    }
}

NM_HD void mask_by_threshold(const uint32_t* keys, int n, int m, int bits, uint8_t* keep) {
    const uint32_t smallest = nth_key(keys, m, n, bits);
    int above = 0;
    for (int i = 0; i < m; ++i) above += keys[i] > smallest;
    int ties = n - above;
    for (int i = 0; i < m; ++i) {
        const bool tie = keys[i] == smallest && ties > 0;
        ties -= tie;
        keep[i] = keys[i] > smallest || tie;
    }
}

// keep[i] = 1 for the n kept of m. Small groups compare all pairs; larger ones find the n-th key.
NM_HD void mask_group(const uint32_t* keys, int n, int m, int bits, uint8_t* keep) {
    if (n == 1) {
        mask_of_largest(keys, m, keep);
    } else if (m <= 16) {
        mask_by_rank(keys, n, m, keep);
    } else {
        mask_by_threshold(keys, n, m, bits, keep);
    }
}

}  // namespace nm
