// Groups of any N:M in shared memory: a block takes a tile of whole groups.
//
// Up to M = 32 a thread takes an element and compares it with all of its group, about 3 M instructions. In larger groups
// a warp searches the n-th largest key bit by bit: about 110 instructions an element for M = 256, 155 for M = 64, half of
// that for 16 bits. The usual small patterns do not come here; they keep a group in the registers of one thread.
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

// nth_key of core/rank.h by all lanes of a warp together.
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

    // Whole groups of m that a tile holds.
    static NM_HD int groups(int m) { return kElements / m; }

    // The first group of this block's tile.
    static NM_DEVICE int64_t first_group(int m) { return int64_t(blockIdx.x) * groups(m); }

    // How many of `all` groups this block has.
    static NM_DEVICE int groups_here(int64_t all, int m) {
        const int64_t left = all - first_group(m);
        return left < groups(m) ? int(left) : groups(m);
    }

    // Fills `keys` from the block's part of w; returns how many elements there are. This and the functions below are for
    // all threads of a block together, and what they wrote is there for all when they return.
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

    // Sets kKept, which no key has, in the keys of the n largest of each group.
    NM_DEVICE void mark_kept(int here, int n, int m, int bits) {
        if (m > kRanked) {
            for (int group = int(threadIdx.x / 32); group < here / m; group += kThreads / 32) mark_by_warp(keys + group * m, n, m, bits);
        } else {
            uint32_t kept = 0;  // a bit for each of this thread's elements: nobody writes a key that others still compare
            for (int e = int(threadIdx.x), k = 0; e < here; e += kThreads, ++k) kept |= uint32_t(rank_in_group(keys, e, m) < n) << k;
            __syncthreads();
            for (int e = int(threadIdx.x), k = 0; e < here; e += kThreads, ++k) keys[e] |= (kept >> k & 1u) * kKept;
        }
        __syncthreads();
    }

    uint32_t keys[kElements];
    uint32_t thresholds[kElements];  // of each group, where they were asked for

  private:
    // A lane reads and writes its own elements only, after all have counted them.
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
