// S-STE's continuous projection of one group (Hu, Zhu, Chen, NeurIPS 2024):
//
//   S_i = sign(w_i) max(|w_i| - t, 0),   t = the (n+1)-th largest magnitude, 0 for n == m
//
// t follows the order of rank.h. The difference is taken in fp32 and rounded once to T; zero results are +0.0;
// NaN where either term is NaN or both are infinite.
#pragma once

#include "rank.h"

namespace nm {

// The (n+1)-th largest key; n < m.
NM_HD uint32_t threshold_key(const uint32_t* keys, int n, int m, int bits) {
    if (m > 16) return nth_key(keys, m, n + 1, bits);
    uint32_t found = 0;
    for (int i = 0; i < m; ++i) {
        int rank = 0;
        for (int j = 0; j < i; ++j) rank += keys[j] >= keys[i];
        for (int j = i + 1; j < m; ++j) rank += keys[j] > keys[i];
        found = rank == n ? keys[i] : found;
    }
    return found;
}

template <class T>
NM_HD T shrink(T w, float t) {
    const float x = to_float(w);
    const float d = magnitude(x) - t;
    return from_float<T>(d <= 0.0f ? 0.0f : with_sign(d, x));
}

}  // namespace nm
