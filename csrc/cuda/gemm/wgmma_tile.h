// The partition of a block of the wgmma.sp kernel, its shared memory, and the descriptors of tensor cores and copies. All of it can
// be computed on the host, where tests check it.
//
// A slab is 64 of k in 16 bits, 128 in 8 bits. Of A it has 64 bytes a row, for the tensor cores a dense matrix half as wide. Of B it has
// 128-byte rows of k, or with kByColumn in 16 bits boxes of 64 columns, whose rows are 128 bytes of one k. Both lie swizzled, as copies
// of boxes leave and tensor cores expect them: of an address, bits 4 to 6 are changed (xor) by bits 7 to 9, with 64-byte rows bits 4 and
// 5 by 7 and 8. So rows that follow each other have the same piece of 16 bytes in different banks.
#pragma once

#include <cstdint>

#include "tile.h"

namespace nm::cuda::gemm {

// Rows x Cols of D in a block, Stages slabs in shared memory; blocks of a cluster are below each other and share B. Two warpgroups
// multiply, each Rows / 2 by all columns, a third one copies.
template <int Rows, int Cols, int Stages, int Cluster, int Bytes>
struct TileOf {
    static constexpr int kBytes = Bytes, kDeep = 2 * kDepth / Bytes;  // of an element of B, and of k in a slab
    static constexpr int kRows = Rows, kCols = Cols, kStages = Stages, kCluster = Cluster;
    static constexpr int kMultiply = 2, kThreads = 128 * (kMultiply + 1);
    static constexpr int kDown = Rows / (64 * kMultiply), kSums = Cols / 2;  // instructions of a warpgroup for half a slab, and their sums

    // bytes of a slab: B, A's values, its metadata
    static constexpr int kDense = Cols * 128, kValues = Rows * 64, kMetadata = Rows * kDeep / 8;
    static constexpr int kStage = kDense + kValues + kMetadata;

    static constexpr int kWordBytes = kDeep * 8;  // of metadata of 64 rows

    // Results leave in parts of 64 rows and up to 64 columns. A warpgroup has 16 KB for them: one part in fp32, or two in 16 bits,
    // of which one is stored while the other is written.
    static constexpr int kPartCols = Cols < 64 ? Cols : 64, kAcross = Cols / kPartCols, kParts = kDown * kAcross;
    static constexpr int kRounded = 8192, kStaging = 2 * kRounded;
    static constexpr int kBarriers = Stages * kStage + kMultiply * kStaging;  // where they begin; full ones, then empty ones
    static constexpr int kShared = kBarriers + 2 * 8 * Stages;

    static_assert(Rows % (64 * kMultiply) == 0 && kStage % 1024 == 0, "swizzles repeat after 1024 bytes");
    static_assert(kDown * kSums <= 192, "sums of a thread, of 240 registers");
    static_assert(Stages >= 2 && kShared <= 227 * 1024 && Cols / Cluster % 8 == 0);
};

template <int Rows, int Cols, int Stages, int Cluster>
struct WideTile : TileOf<Rows, Cols, Stages, Cluster, 2> {};

template <int Rows, int Cols, int Stages, int Cluster>
struct EightTile : TileOf<Rows, Cols, Stages, Cluster, 1> {};

// Shared memory binds: a tensor core that multiplies 2:4 reads B at 128 bytes a cycle for every 64 rows, which is all there is, and
// A and the copies come on top. So tiles are as near to a square as registers allow, and copies of B are shared by two blocks.
using Wide = WideTile<256, 192, 4, 2>;
using Broad = WideTile<256, 128, 5, 2>;
using Square = WideTile<128, 128, 7, 2>;
using Narrow = WideTile<128, 64, 10, 1>;
using Thin = WideTile<128, 16, 12, 1>;

// In 8 bits, whose slabs are as many bytes but for metadata. Where sums are promoted a thread has two for each result, and rows are half
// as many.
using EightWide = EightTile<256, 192, 4, 2>;
using EightTall = EightTile<128, 192, 5, 2>;
using EightSquare = EightTile<128, 128, 7, 2>;

// Matrix descriptors of wgmma (PTX ISA 9.7.15.5.1.2): addresses and distances in 16 bytes, the swizzle in the top bits.
enum Swizzle : int { kSwizzle128 = 1, kSwizzle64 = 2 };

NM_HD constexpr uint64_t descriptor(uint32_t at, uint32_t leading, uint32_t stride, Swizzle swizzle) {
    return uint64_t(at >> 4 & 0x3fffu) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(swizzle) << 62;
}

// 64 rows of A's values, from half a slab * step on, which begin at `at`: eight rows take 512 bytes.
NM_HD constexpr uint64_t values_descriptor(uint32_t at, int step) { return descriptor(at + step * 32, 0, 512, kSwizzle64); }

// All columns of B. Eight of them, or eight of k, take 1024 bytes; a box of 64 columns takes 8192.
NM_HD constexpr uint64_t dense_descriptor(uint32_t at, int step, bool by_column) {
    return by_column ? descriptor(at + step * 4096, 8192, 1024, kSwizzle128) : descriptor(at + step * 64, 0, 1024, kSwizzle128);
}

// What copies of boxes are told of a row-major matrix.
struct Map {
    uint64_t address;
    int64_t inner, outer;  // sizes: of a row, and rows
    int box_inner, box_outer;
    Swizzle swizzle;
    int bytes;  // of an element
};

// Those of a GEMM: A's values, B, and D in 16 bits.
struct Maps {
    Map values, dense, out;
};

template <class Tile>
Maps maps_of(const void* values, const void* dense, const void* out, int64_t m, int64_t n, int64_t k, bool by_column) {
    constexpr int bytes = Tile::kBytes;
    const Map a{uint64_t(uintptr_t(values)), k / 2, m, 64 / bytes, Tile::kRows, kSwizzle64, bytes};
    const uint64_t b = uint64_t(uintptr_t(dense)), d = uint64_t(uintptr_t(out));
    const Map by_depth{b, k, n, 128 / bytes, Tile::kCols / Tile::kCluster, kSwizzle128, bytes};
    if (!by_column) return {a, by_depth, {d, m, n, 64, Tile::kPartCols, kSwizzle128, 2}};
    const Map of_columns{b, n, k, 64, kDepth / Tile::kCluster, kSwizzle128, 2};
    return {a, bytes == 1 ? by_depth : of_columns, {d, n, m, 64, 64, kSwizzle128, 2}};
}

}  // namespace nm::cuda::gemm
