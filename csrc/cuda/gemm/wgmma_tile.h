// How a block of the wgmma.sp kernel is cut, where bytes lie in its shared memory, and how instructions are told: by descriptors the
// tensor cores, by tensor maps the copies. All of it is arithmetic that the host can do too, and tests do.
//
// A slab is 64 of k. Of A it has 32 values a row: a matrix of 64-byte rows, for the tensor cores a dense one half as wide. Of B it has
// 64 elements: 128-byte rows of k, or with kByColumn boxes of 64 columns, whose rows are 128 bytes of one k. Both lie swizzled, as copies
// of boxes leave and tensor cores expect them: of an address, bits 4 to 6 are changed (xor) by bits 7 to 9, with 64-byte rows bits 4 and
// 5 by 7 and 8. So rows that follow each other have the same piece of 16 bytes in different banks.
#pragma once

#include <cstdint>

#include "tile.h"

namespace nm::cuda::gemm {

// Rows x Cols of D in a block, Stages slabs in shared memory; blocks of a cluster are below each other and share B. Two warpgroups
// multiply, each Rows / 2 by all columns, a third one copies.
template <int Rows, int Cols, int Stages, int Cluster>
struct WideTile {
    static constexpr int kRows = Rows, kCols = Cols, kStages = Stages, kCluster = Cluster;
    static constexpr int kMultiply = 2, kThreads = 128 * (kMultiply + 1);
    static constexpr int kDown = Rows / (64 * kMultiply), kSums = Cols / 2;  // instructions of a warpgroup for 32 of k, and their sums

    // bytes of a slab: B, A's values, its metadata
    static constexpr int kDense = Cols * kDepth * 2, kValues = Rows * kDepth, kMetadata = Rows * kDepth / 8;
    static constexpr int kStage = kDense + kValues + kMetadata;

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

// Shared memory binds: a tensor core that multiplies 2:4 reads B at 128 bytes a cycle for every 64 rows, which is all there is, and
// A and the copies come on top. So tiles are as near to a square as registers allow, and copies of B are shared by two blocks.
using Wide = WideTile<256, 192, 4, 2>;
using Broad = WideTile<256, 128, 5, 2>;
using Square = WideTile<128, 128, 7, 2>;
using Narrow = WideTile<128, 64, 10, 1>;
using Thin = WideTile<128, 16, 12, 1>;

// Matrix descriptors of wgmma (PTX ISA 9.7.15.5.1.2): addresses and distances in 16 bytes, the swizzle in the top bits.
enum Swizzle : int { kSwizzle128 = 1, kSwizzle64 = 2 };

NM_HD constexpr uint64_t descriptor(uint32_t at, uint32_t leading, uint32_t stride, Swizzle swizzle) {
    return uint64_t(at >> 4 & 0x3fffu) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(swizzle) << 62;
}

// 64 rows of A's values, from 32 * step of k on, which begin at `at`: eight rows take 512 bytes.
NM_HD constexpr uint64_t values_descriptor(uint32_t at, int step) { return descriptor(at + step * 32, 0, 512, kSwizzle64); }

// All columns of B. Eight of them, or eight of k, take 1024 bytes; a box of 64 columns takes 8192.
NM_HD constexpr uint64_t dense_descriptor(uint32_t at, int step, bool by_column) {
    return by_column ? descriptor(at + step * 4096, 8192, 1024, kSwizzle128) : descriptor(at + step * 64, 0, 1024, kSwizzle128);
}

// What copies of boxes are told of a row-major matrix of 16-bit elements.
struct Map {
    uint64_t address;
    int64_t inner, outer;  // sizes: of a row, and rows
    int box_inner, box_outer;
    Swizzle swizzle;
};

// Those of a GEMM: A's values, B, and D in 16 bits.
struct Maps {
    Map values, dense, out;
};

template <class Tile>
Maps maps_of(const void* values, const void* dense, const void* out, int64_t m, int64_t n, int64_t k, bool by_column) {
    const Map a{uint64_t(uintptr_t(values)), k / 2, m, kDepth / 2, Tile::kRows, kSwizzle64};
    const uint64_t b = uint64_t(uintptr_t(dense)), d = uint64_t(uintptr_t(out));
    if (by_column) return {a, {b, n, k, 64, kDepth / Tile::kCluster, kSwizzle128}, {d, n, m, 64, 64, kSwizzle128}};
    return {a, {b, k, n, kDepth, Tile::kCols / Tile::kCluster, kSwizzle128}, {d, m, n, 64, Tile::kPartCols, kSwizzle128}};
}

}  // namespace nm::cuda::gemm
