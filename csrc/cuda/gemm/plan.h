// Which tile a product takes, and how many parts its depth is cut into: the choice whose estimated time is least. The
// estimate counts cycles of a multiprocessor of sm_80; it is there to compare, not to predict.
#pragma once

#include <algorithm>

#include "../launch.h"
#include "product.h"
#include "tile.h"

namespace nm::cuda::gemm {

enum TileCode : int { kLarge = 0, kMiddle = 1, kSmall = 2 };

// f(tile) for a code.
template <class F>
void by_tile(int tile, const F& f) {
    switch (tile) {
        case kLarge: return f(Large{});
        case kMiddle: return f(Middle{});
        case kSmall: return f(Small{});
        default: throw std::invalid_argument("tile " + std::to_string(tile) + " of a product is not known");
    }
}

struct Plan {
    int tile, splits;
};

constexpr int kMostSplits = 32;
constexpr int kFewestSlabs = 4;  // of a part
constexpr double kBytes = 12;    // of memory, for each cycle and multiprocessor

// Parts of so many slabs, none of them empty.
inline int part_of(int64_t slabs, int splits) { return int(std::max<int64_t>(1, cdiv(slabs, splits))); }

// Cycles that a multiprocessor takes for a slab of one block: of tensor cores, which multiply 2048 a cycle, or of shared
// memory, which moves 128 bytes, both for copies into it and for reads of each warp.
template <class Tile>
double slab_cycles() {
    constexpr double warps = Tile::kThreads / 32;
    constexpr double reads = warps * (Tile::kWarpRows * kDepth + Tile::kWarpCols * kDepth * 2 + Tile::kWarpRows * 8);
    return std::max(double(Tile::kRows) * Tile::kCols * kDepth / 2048, (reads + Tile::kStage) / 128);
}

// Cycles of a product: those of its busiest multiprocessor, or those in which memory delivers the operands, which the others
// hide for the most part.
template <class Tile>
double estimated(int64_t m, int64_t n, int64_t k, int64_t part, int splits, int processors) {
    // blocks of a multiprocessor share it; a block begins by waiting for memory and ends by storing
    const double rounds = double(cdiv(cdiv(m, Tile::kRows) * cdiv(n, Tile::kCols) * splits, processors));
    const double busy = rounds * (double(part) * slab_cycles<Tile>() + 1200.0 / Tile::kBlocks + Tile::kRows * Tile::kCols / 16.0);
    const double memory = (double(m) * double(k) * 1.125 + double(n) * double(k) * 2 + double(m) * double(n) * 2) / (kBytes * processors);
    // fp32 parts are written and read by a second launch
    const double parts = splits > 1 ? double(m) * double(n) * 8 * splits / (kBytes * processors) + 4000 : 0;
    return std::max(busy, memory) + std::min(busy, memory) / 8 + parts;
}

// The best of each tile that fits into `shared` bytes, with every number of parts that is of use.
inline Plan choose(int64_t m, int64_t n, int64_t k, bool by_column, int processors, int64_t shared) {
    Plan best{kSmall, 1};
    double least = -1;
    const int64_t slabs = std::max<int64_t>(1, k / kDepth);
    for (int tile : {kLarge, kMiddle, kSmall}) {
        if (by_column && tile == kSmall) continue;
        by_tile(tile, [&](auto shape) {
            using Shape = decltype(shape);
            if (Shape::kShared > shared && tile != kSmall) return;
            for (int splits = 1; splits <= kMostSplits && (splits == 1 || part_of(slabs, splits) >= kFewestSlabs); ++splits) {
                const int part = part_of(slabs, splits);
                if (cdiv(slabs, part) < splits) continue;
                const double cycles = estimated<Shape>(m, n, k, part, splits, processors);
                if (least < 0 || cycles < least) {
                    least = cycles;
                    best = {tile, splits};
                }
            }
        });
    }
    return best;
}

}  // namespace nm::cuda::gemm
