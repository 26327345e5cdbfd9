// N:M masks of weights with four neighbours per thread: a group is one thread for M = 4, otherwise M / 4 neighbouring lanes of a
// warp.
//
// Four per thread gives 16-byte accesses of fp32 that are consecutive over a warp, for every M.
#pragma once

#include "../core/rank.h"
#include "platform.h"

namespace nm::cuda {

NM_DEVICE bool two_or_three(bool a, bool b, bool c) { return (a && b) || (c && (a || b)); }

// a[i][j], i < j: i ranks before j.
NM_DEVICE void mask_of_four(int n, const uint32_t* keys, bool* keep) {
    const bool a01 = keys[0] >= keys[1], a02 = keys[0] >= keys[2], a03 = keys[0] >= keys[3];
    const bool a12 = keys[1] >= keys[2], a13 = keys[1] >= keys[3], a23 = keys[2] >= keys[3];
    if (n == 2) {
        keep[0] = two_or_three(a01, a02, a03);
        keep[1] = two_or_three(!a01, a12, a13);
        keep[2] = two_or_three(!a02, !a12, a23);
        keep[3] = two_or_three(!a03, !a13, !a23);
    } else {
        keep[0] = a01 && a02 && a03;
        keep[1] = !a01 && a12 && a13;
        keep[2] = !a02 && !a12 && a23;
        keep[3] = !a03 && !a13 && !a23;
    }
}

// The largest of a group over that many lanes; the first on ties.
template <int Lanes>
NM_DEVICE void mask_of_largest_over(const uint32_t* keys, bool* keep) {
    uint32_t largest = max(max(keys[0], keys[1]), max(keys[2], keys[3]));
    NM_UNROLL
    for (int far = 1; far < Lanes; far *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, far));
    bool sought = true;
    NM_UNROLL
    for (int i = 0; i < 4; ++i) {
        keep[i] = sought && keys[i] == largest;
        sought = sought && keys[i] != largest;
    }
    const int lane = int(threadIdx.x) % 32;
    const uint32_t found = __ballot_sync(~0u, !sought), before = (1u << lane) - (1u << lane / Lanes * Lanes);
    NM_UNROLL
    for (int i = 0; i < 4; ++i) keep[i] = keep[i] && (found & before) == 0;
}

// The n largest of a group over that many lanes.
template <int Lanes>
NM_DEVICE void mask_by_rank_over(int n, const uint32_t* keys, bool* keep) {
    int rank[4] = {};
    NM_UNROLL
    for (int i = 0; i < 4; ++i) {
        NM_UNROLL
        for (int j = i + 1; j < 4; ++j) {
            const bool first = keys[i] >= keys[j];
            rank[j] += first;
            rank[i] += !first;
        }
    }
    const int lane = int(threadIdx.x) % Lanes;
    NM_UNROLL
    for (int far = 1; far < Lanes; ++far) {
        const uint32_t tie = (lane ^ far) < lane;  // equal ones there rank first
        NM_UNROLL
        for (int j = 0; j < 4; ++j) {
            const uint32_t other = __shfl_xor_sync(~0u, keys[j], far) + tie;
            NM_UNROLL
            for (int i = 0; i < 4; ++i) rank[i] += other > keys[i];
        }
    }
    NM_UNROLL
    for (int i = 0; i < 4; ++i) keep[i] = rank[i] < n;
}

// keep[i] of the thread's four weights. All lanes of the warp must call it if M > 4.
template <int N, int M>
NM_DEVICE void mask_quad(const float* w, bool* keep) {
    static_assert(M == 4 || M == 8 || M == 16 || M == 32);
    uint32_t keys[4];
    NM_UNROLL
    for (int i = 0; i < 4; ++i) keys[i] = Key<float>::of(w[i]);
    if constexpr (M == 4) {
        static_assert(N <= 2);
        mask_of_four(N, keys, keep);
    } else if constexpr (N == 1) {
        mask_of_largest_over<M / 4>(keys, keep);
    } else {
        mask_by_rank_over<M / 4>(N, keys, keep);
    }
}

}  // namespace nm::cuda
