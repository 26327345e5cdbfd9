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

// The same of a group in registers: the n+1 largest keys, kept in order while the others come.
template <int N, int M>
NM_HD uint32_t threshold_key(const uint32_t* keys) {
    uint32_t largest[N + 1] = {};
    NM_UNROLL
    for (int i = 0; i < M; ++i) {
        uint32_t key = keys[i];
        NM_UNROLL
        for (int k = 0; k <= N; ++k) {
            const uint32_t before = largest[k];
            largest[k] = before > key ? before : key;
            key = before > key ? key : before;
        }
    }
    return largest[N];
}

template <class T>
NM_HD T shrink(T w, float t) {
    const float x = to_float(w);
    const float d = magnitude(x) - t;
    return from_float<T>(d <= 0.0f ? 0.0f : with_sign(d, x));
}

}  // namespace nm
