// rank.h and threshold.h for a group whose N and M the compiler knows: all loops unroll and the group stays in registers,
// as a GPU wants it. The same results.
#pragma once

#include "rank.h"

namespace nm {

// The n-th largest key, n = 1 the largest: the n largest are kept in order while the others come.
template <int N, int M>
NM_HD uint32_t nth_key(const uint32_t* keys) {
    uint32_t largest[N] = {};
    NM_UNROLL
    for (int i = 0; i < M; ++i) {
        uint32_t key = keys[i];
        NM_UNROLL
        for (int k = 0; k < N; ++k) {
            const uint32_t before = largest[k];
            largest[k] = before > key ? before : key;
            key = before > key ? key : before;
        }
    }
    return largest[N - 1];
}

// The (n+1)-th largest key, 0 for n == m.
template <int N, int M>
NM_HD uint32_t threshold_key(const uint32_t* keys) {
    if constexpr (N < M) {
        return nth_key<N + 1, M>(keys);
    } else {
        return 0;
    }
}

// keep[i] = 1 for the n kept of m; keys have `Bits` bits. With its place below it no short key ties, so that the last one
// that is kept tells all: half the instructions of comparing all pairs.
template <int N, int M, int Bits>
NM_HD void mask_group(const uint32_t* keys, uint8_t* keep) {
    if constexpr (Bits > 16 || N == 1) {
        mask_group(keys, N, M, Bits, keep);
    } else {
        uint32_t placed[M];
        NM_UNROLL
        for (int i = 0; i < M; ++i) placed[i] = keys[i] * 256u + uint32_t(M - 1 - i);
        const uint32_t last = nth_key<N, M>(placed);
        NM_UNROLL
        for (int i = 0; i < M; ++i) keep[i] = placed[i] >= last;
    }
}

}  // namespace nm
