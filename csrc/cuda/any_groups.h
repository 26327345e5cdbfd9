// Groups of any N:M in shared memory: a block takes a tile of whole groups, a thread one element at a time.
//
// The rank of an element among its group takes M comparisons, so this costs more the larger M is. The usual small
// patterns do not come here; they keep a group in the registers of one thread.
#pragma once

#include "../core/rank.h"
#include "platform.h"

namespace nm::cuda {

// How many elements of its group come before element e of the tile: it is kept iff fewer than n do.
NM_DEVICE int rank_in_group(const uint32_t* keys, int e, int m) {
    const int first = e / m * m;
    const uint32_t mine = keys[e];
    int rank = 0;
    for (int j = first; j < e; ++j) rank += keys[j] >= mine;
    for (int j = e + 1; j < first + m; ++j) rank += keys[j] > mine;
    return rank;
}

struct AnyTile {
    static constexpr int kElements = 2048, kThreads = 256;
    static_assert(kElements >= kMaxM);

    // Whole groups of m that a tile holds.
    static NM_HD int groups(int m) { return kElements / m; }

    // The first group of this block's tile.
    static NM_DEVICE int64_t first_group(int m) { return int64_t(blockIdx.x) * groups(m); }

    // How many of `all` groups this block has.
    static NM_DEVICE int groups_here(int64_t all, int m) {
        const int64_t left = all - first_group(m);
        return left < groups(m) ? int(left) : groups(m);
    }

    // Fills `keys` from the block's part of w; returns how many elements there are. All threads of the block together.
    template <class T>
    NM_DEVICE int load(const T* w, int64_t all, int m) {
        const int here = groups_here(all, m) * m;
        w += first_group(m) * m;
        for (int e = int(threadIdx.x); e < here; e += kThreads) keys[e] = Key<T>::of(w[e]);
        __syncthreads();
        return here;
    }

    // Fills `thresholds` with the (n+1)-th largest key of each group; n < m.
    NM_DEVICE void find_thresholds(int here, int n, int m) {
        for (int e = int(threadIdx.x); e < here; e += kThreads) {
            if (rank_in_group(keys, e, m) == n) thresholds[e / m] = keys[e];
        }
        __syncthreads();
    }

    uint32_t keys[kElements];
    uint32_t thresholds[kElements];  // of each group, where they were asked for
};

}  // namespace nm::cuda
