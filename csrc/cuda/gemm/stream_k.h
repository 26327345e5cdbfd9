// Stream-K (Osama et al., arXiv 2301.03598) for the last wave: tiles that do not fill it are divided along k, so that all clusters work in
// it. Full waves are as without it.
//
// The slabs of those tiles, tile after tile, are divided into equal shares, one for each cluster, in order. A share, which is no longer than
// a tile, is up to two pieces of tiles. The sums of a piece that is not a whole tile go to a workspace, and a second launch adds those of a
// tile in the order of k: results are the same in every run, and no cluster waits for another.
#pragma once

#include "../kernels.h"
#include "../platform.h"

namespace nm::cuda::gemm {

constexpr int kStreamK = 0;  // as the number of parts of k

// Slabs first to last of a tile.
struct Piece {
    int tile, first, last;
};

struct StreamK {
    int whole;  // tiles of full waves
    int slabs;  // of a tile
    int units;  // slabs of all other tiles
    int share;  // of them for a cluster
    int clusters;
    float* sums;  // of pieces

    // A cluster's work in turns: the number of a whole tile, or `whole` and the number of a unit.
    NM_HD int start(int cluster) const { return cluster < whole ? cluster : whole + cluster * share; }
    NM_HD bool more(int cluster, int turn) const { return turn < whole || turn - whole < end(cluster); }

    NM_HD int next(int cluster, int turn) const {
        if (turn >= whole) {
            const Piece now = piece(cluster, turn);
            return turn + now.last - now.first;
        }
        return turn + clusters < whole ? turn + clusters : whole + cluster * share;
    }

    NM_HD Piece piece(int cluster, int turn) const {
        if (turn < whole) return {turn, 0, slabs};
        const int unit = turn - whole, tile = unit / slabs, first = unit - tile * slabs, left = end(cluster) - unit;
        return {whole + tile, first, left < slabs - first ? first + left : slabs};
    }

    NM_HD int end(int cluster) const { return (cluster + 1) * share < units ? (cluster + 1) * share : units; }

    // The position of a piece among all: the next one is of the next cluster, or of the next tile, or of both.
    NM_HD int place(int cluster, int tile) const { return cluster + tile - whole; }
    NM_HD int places() const { return clusters + units / slabs; }
};

}  // namespace nm::cuda::gemm

namespace nm::cuda {

// The best tile for stream-K, the floats of its workspace, and the estimated time, that of gemm_wgmma_plan being 1; infinite if all waves
// are full.
struct StreamKPlan {
    int tile;
    int64_t floats;
    double time;
};

StreamKPlan gemm_stream_k_plan(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu);

// The second launch, which gemm_wgmma_sp makes itself; for tests, in the emulator.
void gemm_stream_k_finish(const GemmCall& call, int processors, const Queue& queue);

}  // namespace nm::cuda
