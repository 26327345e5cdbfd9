// The partition of a block's tile, and its layout in shared memory.
//
// Shared memory delivers 16 bytes to each of 8 threads per cycle if they are in different 16-byte banks of 128 bytes. ldmatrix
// reads 16 bytes of eight consecutive rows, and rows have at least 128 bytes, or 64. So rows are swizzled: piece `piece` of 16
// bytes is at `piece ^ (a number of the row)`.
#pragma once

#include "../platform.h"

namespace nm::cuda::gemm {

constexpr int kDepth = 64;  // of k per slab: the columns of a word of metadata

// Rows x Cols of D in a block, WarpRows x WarpCols in a warp, Stages slabs in shared memory, Blocks of a multiprocessor.
template <int Rows, int Cols, int WarpRows, int WarpCols, int Stages, int Blocks>
struct Tile {
    static constexpr int kRows = Rows, kCols = Cols, kWarpRows = WarpRows, kWarpCols = WarpCols, kStages = Stages, kBlocks = Blocks;
    static constexpr int kWarpsAcross = Cols / WarpCols, kThreads = 32 * (Rows / WarpRows) * kWarpsAcross;
    static constexpr int kDown = WarpRows / 16, kAcross = WarpCols / 8;  // instructions of a warp for 32 of k

    // bytes of a slab: B, A's values, its metadata
    static constexpr int kDense = Cols * kDepth * 2, kValues = Rows * kDepth, kMetadata = Rows * kDepth / 8;
    static constexpr int kStage = kDense + kValues + kMetadata;
    static constexpr int kShared = Stages * kStage;

    static_assert(WarpRows % 32 == 0 && WarpCols % 32 == 0 && kAcross % 2 == 0 && Stages >= 2);
    static_assert(Rows * Cols * 4 <= kShared, "the sums of a block go through the memory of its stages");
};

// 64x64 of a warp needs 128 registers for sums and reads 192 bytes of shared memory per product of 16x8x32, as long as the
// tensor core of sm_80 takes for it leaves room for 256. With 256 rows the copies into shared memory fit in as well.
using Large = Tile<256, 128, 64, 64, 4, 1>;
using Middle = Tile<128, 128, 64, 64, 3, 2>;
using Small = Tile<64, 64, 32, 32, 4, 3>;

// The byte of a row's piece of 16 bytes in a tile whose rows have 64 bytes: two rows fill the banks.
NM_DEVICE uint32_t at_64(int row, int piece) { return uint32_t(row * 64 + ((piece ^ (row >> 1 & 3)) << 4)); }

// In a tile whose rows have `Bytes`, a multiple of 128.
template <int Bytes>
NM_DEVICE uint32_t at_128(int row, int piece) {
    static_assert(Bytes % 128 == 0);
    return uint32_t(row * Bytes + ((piece ^ (row & 7)) << 4));
}

}  // namespace nm::cuda::gemm
