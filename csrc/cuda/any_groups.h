// Groups of any N:M in shared memory: a block takes a tile of whole groups, a thread one element at a time.
//
// The rank of an element among its group takes M comparisons, so this costs more the larger M is. The usual small
// patterns do not come here; they keep a group in the registers of one thread.
#pragma once

#include "../core/rank.h"
#include "platform.h"

namespace nm::cuda {

struct AnyTile {
    static constexpr int kElements = 2048, kThreads = 256;
    static_assert(kElements >= kMaxM);

    // Whole groups of m that a tile holds.
    static NM_HD int groups(int m) { return kElements / m; }

    uint32_t keys[kElements];
    uint32_t thresholds[kElements];  // of each group, where it was asked for
};

// How many elements of its group come before element e of the tile: it is kept iff fewer than n do.
NM_DEVICE int rank_in_group(const uint32_t* keys, int e, int m) {
    const int first = e / m * m;
    const uint32_t mine = keys[e];
    int rank = 0;
    for (int j = first; j < e; ++j) rank += keys[j] >= mine;
    for (int j = e + 1; j < first + m; ++j) rank += keys[j] > mine;
    return rank;
}

}  // namespace nm::cuda
