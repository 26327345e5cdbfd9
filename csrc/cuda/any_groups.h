// Groups of any N:M in shared memory: a block processes a tile of whole groups.
//
// Up to M = 32 a thread compares one element with all of its group, about 3 M instructions. In larger groups a warp finds the n-th
// largest key bit by bit: about 110 instructions per element for M = 256, 155 for M = 64, half of that for 16 bits. Common small
// patterns do not use this; they keep a group in the registers of one thread.
#pragma once

#include "../core/rank.h"
#include "platform.h"

namespace nm::cuda {

// The rank of element e of the tile in its group: it is kept iff the rank is below n.
NM_DEVICE int rank_in_group(const uint32_t* keys, int e, int m) {
    const int first = e / m * m;
    const uint32_t mine = keys[e];
    int rank = 0;
    for (int j = first; j < e; ++j) rank += keys[j] >= mine;
    for (int j = e + 1; j < first + m; ++j) rank += keys[j] > mine;
    return rank;
}

// nth_key of core/rank.h, computed by all lanes of a warp.
NM_DEVICE uint32_t nth_key_of_warp(const uint32_t* keys, int m, int n, int bits) {
    const int lane = int(threadIdx.x % 32);
    uint32_t found = 0;
    for (int bit = bits - 1; bit >= 0; --bit) {
        const uint32_t candidate = found | (1u << bit);
        uint32_t at_least = 0;
        for (int i = lane; i < m; i += 32) at_least += keys[i] >= candidate;
        if (__reduce_add_sync(~0u, at_least) >= uint32_t(n)) found = candidate;
    }
    return found;
}

struct AnyTile {
    static constexpr int kElements = 2048, kThreads = 256;
    static constexpr int kRanked = 32;  // largest M whose elements are ranked one by one
    static constexpr uint32_t kKept = 1u << 31;
    static_assert(kElements >= kMaxM);

    // Whole groups of m per tile.
    static NM_HD int groups(int m) { return kElements / m; }

    // The first group of this block's tile.
    static NM_DEVICE int64_t first_group(int m) { return int64_t(blockIdx.x) * groups(m); }

    // Number of groups in this block's tile.
    static NM_DEVICE int groups_here(int64_t all, int m) {
        const int64_t left = all - first_group(m);
        return left < groups(m) ? int(left) : groups(m);
    }

    // Fills `keys` from the block's part of w; returns the number of elements. All threads of a block must call this and the
    // functions below, which end with a barrier.
    template <class T>
    NM_DEVICE int load(const T* w, int64_t all, int m) {
        const int here = groups_here(all, m) * m;
        w += first_group(m) * m;
        for (int e = int(threadIdx.x); e < here; e += kThreads) keys[e] = Key<T>::of(w[e]);
        __syncthreads();
        return here;
    }

    // Fills `thresholds` with the (n+1)-th largest key of each group; n < m.
    NM_DEVICE void find_thresholds(int here, int n, int m, int bits) {
        if (m > kRanked) {
            for (int group = int(threadIdx.x / 32); group < here / m; group += kThreads / 32) {
                const uint32_t found = nth_key_of_warp(keys + group * m, m, n + 1, bits);
                if (threadIdx.x % 32 == 0) thresholds[group] = found;
            }
        } else {
            for (int e = int(threadIdx.x); e < here; e += kThreads) {
                if (rank_in_group(keys, e, m) == n) thresholds[e / m] = keys[e];
            }
        }
        __syncthreads();
    }

    // Sets the bit kKept, unused by keys, in the keys of the n largest of each group.
    NM_DEVICE void mark_kept(int here, int n, int m, int bits) {
        if (m > kRanked) {
            for (int group = int(threadIdx.x / 32); group < here / m; group += kThreads / 32) mark_by_warp(keys + group * m, n, m, bits);
        } else {
            uint32_t kept = 0;  // a bit per element of this thread; keys are written only after all comparisons
            for (int e = int(threadIdx.x), k = 0; e < here; e += kThreads, ++k) kept |= uint32_t(rank_in_group(keys, e, m) < n) << k;
            __syncthreads();
            for (int e = int(threadIdx.x), k = 0; e < here; e += kThreads, ++k) keys[e] |= (kept >> k & 1u) * kKept;
        }
        __syncthreads();
    }

    uint32_t keys[kElements];
    uint32_t thresholds[kElements];  // per group, if needed

  private:
    // A lane reads and writes only its own elements, after all have been ranked.
    static NM_DEVICE void mark_by_warp(uint32_t* group, int n, int m, int bits) {
        const uint32_t smallest = nth_key_of_warp(group, m, n, bits), lane = threadIdx.x % 32;
        uint32_t above = 0;
        for (int i = int(lane); i < m; i += 32) above += group[i] > smallest;
        uint32_t ties = uint32_t(n) - __reduce_add_sync(~0u, above);
        for (int first = 0; first < m; first += 32) {
            const int i = first + int(lane);
            const uint32_t key = i < m ? group[i] : 0u;
            const uint32_t tied = __ballot_sync(~0u, i < m && key == smallest);
            const bool tie = (tied >> lane & 1u) != 0 && uint32_t(__popc(tied & ((1u << lane) - 1u))) < ties;
            if (i < m && (key > smallest || tie)) group[i] = key | kKept;
            ties -= min(ties, uint32_t(__popc(tied)));
        }
    }
};

}  // namespace nm::cuda
