// rank.h and threshold.h for compile-time N and M: all loops unroll and the group stays in registers, as GPUs need. Same
// results.
#pragma once

#include "rank.h"

namespace nm {

// The n-th largest key, n = 1 the largest: keeps the n largest so far in order.
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

// keep[i] = 1 for the n kept of m; keys have `Bits` bits. With the position appended no short keys tie, so comparing with
// the last kept one suffices: half the instructions of comparing all pairs.
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
