// Chooses the tile of the wgmma.sp kernel and the number of parts of the depth, with the estimate of plan.h and Hopper's limits:
// shared memory and L2 bandwidth.
#pragma once

#include <limits>

#include "plan.h"
#include "stream_k.h"
#include "wgmma_tile.h"

namespace nm::cuda::gemm {

enum WideCode : int { kWide = 0, kBroad = 1, kSquare = 2, kNarrow = 3, kThin = 4, kWideTiles = 5 };

struct WidePlan : Plan {
    double cycles;  // estimated
};

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
WidePlan choose_among(int tiles, int64_t m, int64_t n, int64_t k, const Gpu& gpu, const Visit& visit) {
    const Rates rates = rates_of(gpu);
    WidePlan best{{0, 1}, -1};
    for (int tile = 0; tile < tiles; ++tile) {
        visit(tile, [&](auto shape) {
            using Shape = decltype(shape);
            each_split(k, [&](int splits, int part) {
                const double cycles = wide_estimated<Shape>(m, n, k, part, splits, gpu.processors, rates);
                if (best.cycles < 0 || cycles < best.cycles) best = {{tile, splits}, cycles};
            });
        });
    }
    return best;
}

inline WidePlan choose_wide(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu) {
    return choose_among(kWideTiles, m, n, k, gpu, [&](int tile, const auto& f) {
        by_wide_tile(tile, [&](auto shape) {
            if (!by_column || takes_columns<decltype(shape)>()) f(shape);
        });
    });
}

// How stream-K divides a GEMM; it has no workspace yet.
template <class Tile>
StreamK stream_of(int64_t m, int64_t n, int64_t k, int processors) {
    const int64_t tiles = cdiv(m, Tile::kRows * Tile::kCluster) * cdiv(n, Tile::kCols), clusters = std::max(1, processors / Tile::kCluster);
    const int64_t slabs = k / kDepth, whole = tiles / clusters * clusters, units = (tiles - whole) * slabs, share = cdiv(units, clusters);
    if (tiles + units > 0x7fffffff) throw std::invalid_argument("gemm: sizes beyond 31 bits");
    return {int(whole), int(slabs), int(units), int(share), int(whole ? clusters : cdiv(units, share)), nullptr};
}

template <class Tile>
int64_t stream_floats(const StreamK& work) {
    return int64_t(work.places()) * Tile::kCluster * (Tile::kRows * Tile::kCols);
}

// The cycles of a GEMM by stream-K; infinite if all its waves are full. Sums of pieces, two of a cluster, are written and read as fast as
// L2 delivers: an assumption.
template <class Tile>
double stream_estimated(int64_t m, int64_t n, int64_t k, int processors, const Rates& rates) {
    const StreamK work = stream_of<Tile>(m, n, k, processors);
    if (work.units == 0) return std::numeric_limits<double>::infinity();
    constexpr double store = Tile::kRows * Tile::kCols / 16.0, sums = Tile::kRows * Tile::kCols * 4.0 / kFromL2;
    const double busy = double(work.whole / work.clusters) * (work.slabs * wide_slab_cycles<Tile>() + store) + work.share * wide_slab_cycles<Tile>() + 2 * sums + 1500;
    const double read = double(work.places()) * Tile::kCluster * sums / processors;
    return with_memory(m, n, k, 1, processors, rates, busy) + rates.launch + read;
}

inline WidePlan choose_stream(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu) {
    WidePlan best{{0, kStreamK}, -1};
    for (int tile = 0; tile < kWideTiles; ++tile) {
        by_wide_tile(tile, [&](auto shape) {
            using Shape = decltype(shape);
            if (by_column && !takes_columns<Shape>()) return;
            const double cycles = stream_estimated<Shape>(m, n, k, gpu.processors, rates_of(gpu));
            if (best.cycles < 0 || cycles < best.cycles) best = {{tile, kStreamK}, cycles};
        });
    }
    return best;
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
