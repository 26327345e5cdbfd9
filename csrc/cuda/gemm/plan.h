// Chooses a GEMM's tile and the number of parts of its depth with the least estimated time. The estimate counts cycles of a
// multiprocessor; it is for comparison, not for prediction.
#pragma once

#include <algorithm>

#include "../kernels.h"
#include "../launch.h"
#include "gemm.h"
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
        default: throw std::invalid_argument("tile " + std::to_string(tile) + " of a GEMM is not known");
    }
}

struct Plan {
    int tile, splits;
};

constexpr int kMostSplits = 32;
constexpr int kFewestSlabs = 4;  // of a part
constexpr double kShared = 128;  // bytes of shared memory that a multiprocessor moves per cycle

// What a multiprocessor does per cycle of the GPU's highest clock.
struct Rates {
    double multiplies;  // by mma.sp, 16 bits with fp32 sums, those with a zero too
    double bytes;       // its share of memory bandwidth
    double launch;      // cycles of an additional launch
};

// Tensor cores by the tables of NVIDIA's whitepapers, but for 9.0: there mma.sync reaches about five eighths of the 4096 of wgmma,
// and from 2000 on shared memory binds first whatever the tile. GeForce cards of 8.6, 8.9 and 12.0 have half of the others' rate,
// which is not considered. An unknown GPU counts as 8.0.
inline double multiplies(int capability) {
    switch (capability) {
        case 86: case 89: case 120: case 121: return 1024;
        case 90: return 2560;
        default: return 2048;
    }
}

inline Rates rates_of(const Gpu& gpu) {
    const bool told = gpu.clock > 0 && gpu.memory_clock > 0 && gpu.memory_bits > 0;  // a virtual GPU may not say
    // nine tenths of peak memory bandwidth; 12 is the rate of an A100, as are its 1410 MHz
    const double bytes = told ? 0.9 * 2 * gpu.memory_clock * (gpu.memory_bits / 8.0) / (double(gpu.clock) * gpu.processors) : 12;
    const double clock = told ? gpu.clock : 1410000;
    return {multiplies(gpu.capability), bytes, 2.8e-3 * clock};
}

// The number of non-empty parts with that many slabs.
inline int part_of(int64_t slabs, int splits) { return int(std::max<int64_t>(1, cdiv(slabs, splits))); }

// The kernel parameters of a call with that many tiles. A D that is not rounded consists of the sums of one part.
template <class T>
Gemm<T> gemm_of(const GemmCall& call, int64_t row_tiles, int64_t col_tiles) {
    float* const parts = call.splits > 1 ? call.parts : call.unrounded ? static_cast<float*>(call.out) : nullptr;
    const Sums<T> sums{static_cast<T*>(call.out), static_cast<const T*>(call.bias), static_cast<const T*>(call.residual),
                       parts, call.by_column ? call.n : call.m, call.by_column ? call.m : call.n, call.activation};
    return {static_cast<const T*>(call.values), call.metadata, static_cast<const T*>(call.dense), sums, call.m, call.n, call.k,
            int(row_tiles), int(col_tiles), part_of(call.k / kDepth, call.splits), call.warps};
}

// D from the sums of several parts of k.
inline void finish_parts(const GemmCall& call, const Queue& queue) {
    if (call.splits == 1) return;
    LinearCall finish{};
    finish.bias = call.bias;
    finish.residual = call.residual;
    finish.y = call.out;
    finish.parts = call.parts;
    finish.dtype = call.unrounded ? int(kFloat32) : call.dtype;
    finish.activation = call.activation;
    finish.tokens = call.by_column ? call.m : call.n;
    finish.rows = call.by_column ? call.n : call.m;
    finish.splits = call.splits;
    cuda::finish_parts(finish, queue);
}

// Cycles per slab of one block: of tensor cores, or of shared memory for copies and each warp's reads.
template <class Tile>
double slab_cycles(const Rates& rates) {
    constexpr double warps = Tile::kThreads / 32;
    constexpr double reads = warps * (Tile::kWarpRows * kDepth + Tile::kWarpCols * kDepth * 2 + Tile::kWarpRows * 8);
    return std::max(double(Tile::kRows) * Tile::kCols * kDepth / rates.multiplies, (reads + Tile::kStage) / kShared);
}

// Cycles of a GEMM: those of its busiest multiprocessor, or those of loading the operands, which mostly overlap.
inline double with_memory(int64_t m, int64_t n, int64_t k, int splits, int processors, const Rates& rates, double busy) {
    const double memory = (double(m) * double(k) * 1.125 + double(n) * double(k) * 2 + double(m) * double(n) * 2) / (rates.bytes * processors);
    // fp32 parts are written and read by a second launch
    const double parts = splits > 1 ? double(m) * double(n) * 8 * splits / (rates.bytes * processors) + rates.launch : 0;
    return std::max(busy, memory) + std::min(busy, memory) / 8 + parts;
}

template <class Tile>
double estimated(int64_t m, int64_t n, int64_t k, int64_t part, int splits, int processors, const Rates& rates) {
    // blocks of a multiprocessor share it; a block begins by waiting for memory and ends by storing
    const double rounds = double(cdiv(cdiv(m, Tile::kRows) * cdiv(n, Tile::kCols) * splits, processors));
    const double busy = rounds * (double(part) * slab_cycles<Tile>(rates) + 1200.0 / Tile::kBlocks + Tile::kRows * Tile::kCols / 16.0);
    return with_memory(m, n, k, splits, processors, rates, busy);
}

// Calls f(splits, slabs per part) for every useful number of parts.
template <class F>
void each_split(int64_t k, const F& f) {
    const int64_t slabs = std::max<int64_t>(1, k / kDepth);
    for (int splits = 1; splits <= kMostSplits && (splits == 1 || part_of(slabs, splits) >= kFewestSlabs); ++splits) {
        const int part = part_of(slabs, splits);
        if (cdiv(slabs, part) >= splits) f(splits, part);
    }
}

// The best among tiles that fit into a block's shared memory.
inline Plan choose(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu) {
    const Rates rates = rates_of(gpu);
    Plan best{kSmall, 1};
    double least = -1;
    for (int tile : {kLarge, kMiddle, kSmall}) {
        if (by_column && tile == kSmall) continue;
        by_tile(tile, [&](auto shape) {
            using Shape = decltype(shape);
            if (Shape::kShared > gpu.shared && tile != kSmall) return;
            each_split(k, [&](int splits, int part) {
                const double cycles = estimated<Shape>(m, n, k, part, splits, gpu.processors, rates);
                if (least < 0 || cycles < least) {
                    least = cycles;
                    best = {tile, splits};
                }
            });
        });
    }
    return best;
}

}  // namespace nm::cuda::gemm
