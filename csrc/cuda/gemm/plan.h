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

// As `estimate` for each tile that fits into `shared` bytes, with every number of parts that is of use.
inline Plan choose(int64_t m, int64_t n, int64_t k, bool by_column, int processors, int64_t shared) {
    Plan best{kSmall, 1};
    double least = -1;
    const int64_t slabs = std::max<int64_t>(1, k / kDepth);
    for (int tile : {kLarge, kMiddle, kSmall}) {
        if (by_column && tile == kSmall) continue;
        by_tile(tile, [&](auto shape) {
            using Shape = decltype(shape);
            if (Shape::kShared > shared && tile != kSmall) return;
            const int64_t blocks = cdiv(m, Shape::kRows) * cdiv(n, Shape::kCols);
            for (int splits = 1; splits <= kMostSplits && (splits == 1 || part_of(slabs, splits) >= kFewestSlabs); ++splits) {
                const int part = part_of(slabs, splits);
                if (cdiv(slabs, part) < splits) continue;
                // blocks of a multiprocessor share it; a block begins by waiting for memory and ends by storing
                const double rounds = double(cdiv(blocks * splits, processors)), fill = 1200.0 / Shape::kBlocks;
                const double store = Shape::kRows * Shape::kCols / 16.0;
                double cycles = rounds * (part * slab_cycles<Shape>() + fill + store);
                // fp32 parts are written and read, some 10 bytes a cycle of a multiprocessor, by a second launch
                if (splits > 1) cycles += double(m) * n * 8 * splits / (10.0 * processors) + 4000;
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
