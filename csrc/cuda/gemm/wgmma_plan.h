// Chooses the tile of the wgmma.sp kernel and the number of parts of the depth, with the estimate of plan.h and Hopper's limits:
// shared memory and L2 bandwidth.
#pragma once

#include "plan.h"
#include "wgmma_tile.h"

namespace nm::cuda::gemm {

enum WideCode : int { kWide = 0, kBroad = 1, kSquare = 2, kNarrow = 3, kThin = 4, kWideTiles = 5 };

// f(tile) for a code.
template <class F>
void by_wide_tile(int tile, const F& f) {
    switch (tile) {
        case kWide: return f(Wide{});
        case kBroad: return f(Broad{});
        case kSquare: return f(Square{});
        case kNarrow: return f(Narrow{});
        case kThin: return f(Thin{});
        default: throw std::invalid_argument("tile " + std::to_string(tile) + " of wgmma.sp is not known");
    }
}

// f(tile) for an 8-bit code; there are two.
template <bool kPromotes, class F>
void by_eight_tile(int tile, const F& f) {
    switch (tile) {
        case 0: return f(std::conditional_t<kPromotes, EightTall, EightWide>{});
        case 1: return f(EightSquare{});
        default: throw std::invalid_argument("tile " + std::to_string(tile) + " of 8-bit wgmma.sp is not known");
    }
}

// Boxes of B by column have 64 columns.
template <class Tile>
constexpr bool takes_columns() {
    return Tile::kCols % 64 == 0;
}

// What a multiprocessor does in a cycle: products of 2:4, the zeros counted (NVIDIA's H100 whitepaper: twice the 989 dense teraflops of
// 132 multiprocessors at 1.83 GHz); bytes that reach it from L2 (4 KB to 5 KB a cycle for all, as others have measured).
constexpr double kSparseMultiplies = 4096, kFromL2 = 32;

// Cycles for a slab. Operands are read, and copies written, through the same 128 bytes a cycle; that writes count there is an
// assumption. B is read once for every 64 rows.
template <class Tile>
double wide_slab_cycles() {
    constexpr double multiply = double(Tile::kRows) * Tile::kCols * kDepth / kSparseMultiplies;
    constexpr double reads = Tile::kRows / 64.0 * Tile::kDense + Tile::kValues + Tile::kMetadata;
    constexpr double copied = Tile::kValues + Tile::kMetadata + double(Tile::kDense) / Tile::kCluster;
    return std::max({multiply, (reads + Tile::kStage) / kShared, copied / kFromL2});
}

template <class Tile>
double wide_estimated(int64_t m, int64_t n, int64_t k, int64_t part, int splits, int processors, const Rates& rates) {
    const int64_t clusters = std::max(1, processors / Tile::kCluster);
    const double rounds = double(cdiv(cdiv(m, Tile::kRows * Tile::kCluster) * cdiv(n, Tile::kCols) * splits, clusters));
    // only the first tile of a block waits for memory; storing results overlaps with loading the next operands, but not with
    // multiplying
    const double busy = rounds * (double(part) * wide_slab_cycles<Tile>() + Tile::kRows * Tile::kCols / 16.0) + 1500;
    return with_memory(m, n, k, splits, processors, rates, busy);
}

// The best of the `tiles` tiles that `visit(tile, f)` passes to f.
template <class Visit>
Plan choose_among(int tiles, int64_t m, int64_t n, int64_t k, const Gpu& gpu, const Visit& visit) {
    const Rates rates = rates_of(gpu);
    Plan best{0, 1};
    double least = -1;
    for (int tile = 0; tile < tiles; ++tile) {
        visit(tile, [&](auto shape) {
            using Shape = decltype(shape);
            each_split(k, [&](int splits, int part) {
                const double cycles = wide_estimated<Shape>(m, n, k, part, splits, gpu.processors, rates);
                if (least < 0 || cycles < least) {
                    least = cycles;
                    best = {tile, splits};
                }
            });
        });
    }
    return best;
}

inline Plan choose_wide(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu) {
    return choose_among(kWideTiles, m, n, k, gpu, [&](int tile, const auto& f) {
        by_wide_tile(tile, [&](auto shape) {
            if (!by_column || takes_columns<decltype(shape)>()) f(shape);
        });
    });
}

// An 8-bit GEMM moves the bytes and issues the instructions of a 16-bit one of half the depth.
inline Plan choose_eight(int64_t m, int64_t n, int64_t k, bool promotes, const Gpu& gpu) {
    return choose_among(2, m, n, k / 2, gpu, [&](int tile, const auto& f) {
        if (promotes) {
            by_eight_tile<true>(tile, f);
        } else {
            by_eight_tile<false>(tile, f);
        }
    });
}

}  // namespace nm::cuda::gemm
