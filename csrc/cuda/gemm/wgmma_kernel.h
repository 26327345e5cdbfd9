// The kernel D = A B with wgmma.mma_async.sp, only for sm_90a; m64nNk32 with metadata in the order "wgmma.sp" in 16 bits, m64nNk64
// with "wgmma.sp.8bit" in 8 bits. m is a multiple of 64.
//
// One warpgroup copies, two multiply. Each stage of shared memory has two barriers: a full one, whose phase ends when all bytes of a slab
// have arrived, and an empty one, whose phase ends when every warp of the cluster that reads the stage has done so. The copying
// thread runs ahead of the others, also into the next tile; the multiplying ones have one group of products in flight while they
// wait for the next slab, and release a stage when the group that reads it is done. Two blocks of a cluster copy one half of B
// each, into both.
//
// Where sums are promoted, those of two slabs, 128 products of a row, are finished and added to others in fp32 while the other
// warpgroup multiplies.
//
// A cluster has every n-th tile, n the number of clusters, whole or of one part of k (`Waves`); by stream-K it has whole tiles of full
// waves, and a share of the last (`Shares`).
#pragma once

#include <algorithm>
#include <stdexcept>

#include "epilogue.h"
#include "stream_k.h"
#include "wgmma_plan.h"

#if defined(NM_SM90A)
#include "tensor_map.h"
#include "wgmma_epilogue.h"
#endif

namespace nm::cuda::gemm {

namespace {  // the kernels of each file are private

#if defined(NM_SM90A)

// A slab's position in the pipeline: its stage, and the parity of the awaited phase.
template <class Tile>
struct Place {
    uint32_t stage = 0, parity = 0;

    NM_DEVICE void next() {
        stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// Barriers and shared memory of a block.
template <class Tile>
struct Pipeline {
    uint32_t shared;

    NM_DEVICE uint32_t stage(uint32_t i) const { return shared + i * Tile::kStage; }
    NM_DEVICE uint32_t full(uint32_t i) const { return shared + Tile::kBarriers + 8 * i; }
    NM_DEVICE uint32_t empty(uint32_t i) const { return full(i + Tile::kStages); }

    NM_DEVICE void init() const {
        for (uint32_t i = 0; i < Tile::kStages; ++i) {
            mbarrier_init(full(i), 1);
            mbarrier_init(empty(i), 4 * Tile::kMultiply * Tile::kCluster);
        }
        fence_mbarrier_init();
    }

    // Signals that a warp has read a stage, to every block that copies into it.
    NM_DEVICE void release(uint32_t i) const {
        const uint32_t lane = threadIdx.x % 32;
        if constexpr (Tile::kCluster == 1) {
            if (lane == 0) mbarrier_arrive(empty(i));
        } else {
            if (lane < Tile::kCluster) mbarrier_arrive(empty(i), lane);
        }
    }
};

// The work of a cluster in turns: every n-th tile of all, n the number of clusters.
template <class Tile>
struct Waves {
    int tiles;

    NM_DEVICE int start() const { return int(blockIdx.x) / Tile::kCluster; }
    NM_DEVICE bool more(int tile) const { return tile < tiles; }
    NM_DEVICE int next(int tile) const { return tile + int(gridDim.x) / Tile::kCluster; }

    // Block `rank` of the cluster at a turn.
    template <class T>
    NM_DEVICE Origin origin(const Gemm<T>& f, int tile, uint32_t rank) const {
        Origin at = f.origin(unsigned(tile), Tile::kRows * Tile::kCluster, Tile::kCols, Tile::kDeep);
        at.row += rank * Tile::kRows;
        return at;
    }
};

// The same by stream-K; see stream_k.h.
template <class Tile>
struct Shares {
    const StreamK& all;

    NM_DEVICE int start() const { return all.start(cluster()); }
    NM_DEVICE bool more(int turn) const { return all.more(cluster(), turn); }
    NM_DEVICE int next(int turn) const { return all.next(cluster(), turn); }

    template <class T>
    NM_DEVICE Origin origin(const Gemm<T>& f, int turn, uint32_t rank) const {
        const Piece piece = all.piece(cluster(), turn);
        Origin at = Waves<Tile>{}.origin(f, piece.tile, rank);
        at.first = piece.first, at.last = piece.last;
        return at;
    }

    // The sums of a piece, to its place: four at a time, those of all threads next to each other.
    NM_DEVICE void leave(int turn, uint32_t rank, const float (&sums)[Tile::kDown][Tile::kSums]) const {
        uint32_t thread = threadIdx.x;
        pin(thread);  // do not keep derived values during the main loop
        const int place = all.place(cluster(), all.piece(cluster(), turn).tile) * Tile::kCluster + int(rank);
        float* const to = all.sums + int64_t(place) * (Tile::kRows * Tile::kCols) + thread * 4;
        NM_UNROLL
        for (int i = 0; i < Tile::kDown * Tile::kSums; i += 4) store_four(to + i * (128 * Tile::kMultiply), sums[i / Tile::kSums] + i % Tile::kSums);
    }

    // Read again each time: what derives from it is not kept during the main loop, and ptxas knows that all threads have the same.
    static NM_DEVICE int cluster() { return int(block_again()) / Tile::kCluster; }
};

// One thread copies slab after slab of tile after tile.
template <class Told, class Tile, bool kOfColumns, class Work>
NM_DEVICE void copy(const CUtensorMap& values, const CUtensorMap& dense, const Told& f, const Work& work, const Pipeline<Tile>& pipeline, uint32_t rank) {
    constexpr uint16_t kAll = (1 << Tile::kCluster) - 1;
    const int slabs = int(f.k / Tile::kDeep), last_block = int(f.m / 64) - 1;
    Place<Tile> place;
    const auto load_dense = [&](uint32_t to, int inner, int outer, uint32_t full) {
        if constexpr (Tile::kCluster == 1) {
            tma_load(to, dense, inner, outer, full);
        } else {
            tma_load(to, dense, inner, outer, full, kAll);
        }
    };
    NM_ONE_BY_ONE
    for (int turn = work.start(); work.more(turn); turn = work.next(turn)) {
        const Origin at = work.origin(f, turn, rank);
        const int row = int(at.row), col = int(at.col);
        NM_ONE_BY_ONE
        for (int slab = at.first; slab < at.last; ++slab, place.next()) {
            const uint32_t to = pipeline.stage(place.stage), full = pipeline.full(place.stage);
            mbarrier_wait(pipeline.empty(place.stage), place.parity ^ 1);  // an unused stage counts as empty
            mbarrier_expect(full, Tile::kStage);
            tma_load(to + Tile::kDense, values, slab * (Tile::kDeep / 2), row, full);
            if constexpr (kOfColumns) {
                constexpr int deep = kDepth / Tile::kCluster;
                NM_UNROLL
                for (int i = 0; i < Tile::kCols / 64; ++i) {
                    load_dense(to + i * 8192 + rank * (deep * 128), col + i * 64, slab * kDepth + int(rank) * deep, full);
                }
            } else {
                constexpr int cols = Tile::kCols / Tile::kCluster;
                load_dense(to + rank * (cols * 128), slab * Tile::kDeep, col + int(rank) * cols, full);
            }
            NM_UNROLL
            for (int i = 0; i < Tile::kRows / 64; ++i) {
                // zero is not valid metadata, so rows below the last get the metadata of the last
                const int own = row / 64 + i, block = own < last_block ? own : last_block;
                constexpr int bytes = Tile::kWordBytes;
                bulk_load(to + Tile::kDense + Tile::kValues + i * bytes, f.metadata + (int64_t(block) * slabs + slab) * (bytes / 4), bytes, full);
            }
        }
    }
}

// One slab in 16 bits: the words of metadata, four instructions or two, and the release of the previous stage.
template <class T, class Tile, bool kOfColumns>
NM_DEVICE void multiply(float (&sums)[Tile::kDown][Tile::kSums], uint32_t (&words)[Tile::kDown], const uint8_t* shared, const Pipeline<Tile>& pipeline,
                        Place<Tile>& place, bool first) {
    const uint32_t thread = threadIdx.x % 128, group = threadIdx.x / 128, block = group * Tile::kDown, stage = place.stage;
    mbarrier_wait(pipeline.full(stage), place.parity);
    NM_UNROLL
    for (int i = 0; i < Tile::kDown; ++i) {
        words[i] = load_word<4>(shared + stage * Tile::kStage + Tile::kDense + Tile::kValues + (block + i) * 512 + thread * 4);
    }
    const uint32_t at = pipeline.stage(stage), values = at + Tile::kDense + block * 4096;
    wgmma_fence();
    NM_UNROLL
    for (int i = 0; i < Tile::kDown; ++i) {
        wgmma_sp<T, 0, kOfColumns>(sums[i], values_descriptor(values + i * 4096, 0), dense_descriptor(at, 0, kOfColumns), words[i], !first);
    }
    NM_UNROLL
    for (int i = 0; i < Tile::kDown; ++i) {
        wgmma_sp<T, 1, kOfColumns>(sums[i], values_descriptor(values + i * 4096, 1), dense_descriptor(at, 1, kOfColumns), words[i], true);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (!first) pipeline.release(stage == 0 ? Tile::kStages - 1 : stage - 1);
    place.next();
}

// Half a slab in 8 bits; then the previous group is done.
template <class A, class B, class Tile, int Step, class Sum>
NM_DEVICE void multiply_half(Sum (&sums)[Tile::kDown][Tile::kSums], uint32_t (&words)[Tile::kDown], const uint8_t* shared, uint32_t stage, uint32_t at,
                             bool add) {
    const uint32_t thread = threadIdx.x % 128, block = threadIdx.x / 128 * Tile::kDown, values = at + Tile::kDense + block * 4096;
    NM_UNROLL
    for (int i = 0; i < Tile::kDown; ++i) {
        words[i] = load_word<4>(shared + stage * Tile::kStage + Tile::kDense + Tile::kValues + (block + i) * 1024 + Step * 512 + thread * 4);
    }
    wgmma_fence();
    NM_UNROLL
    for (int i = 0; i < Tile::kDown; ++i) {
        wgmma_sp_8bit<A, B>(sums[i], values_descriptor(values + i * 4096, Step), dense_descriptor(at, Step, false), words[i], add);
    }
    wgmma_commit();
    wgmma_wait<1>();
}

// One slab in 8 bits, as two groups. Each instruction has a word of its own, and words of one group are loaded while those of the other
// are in use: `even` for first halves, `odd` for second ones. With a whole slab per group ptxas (13.0) serialises all products
// (C7513).
template <class A, class B, class Tile, class Sum>
NM_DEVICE void multiply_eight(Sum (&sums)[Tile::kDown][Tile::kSums], uint32_t (&even)[Tile::kDown], uint32_t (&odd)[Tile::kDown], const uint8_t* shared,
                              const Pipeline<Tile>& pipeline, Place<Tile>& place, bool first) {
    const uint32_t stage = place.stage, at = pipeline.stage(stage);
    mbarrier_wait(pipeline.full(stage), place.parity);
    multiply_half<A, B, Tile, 0>(sums, even, shared, stage, at, !first);
    if (!first) pipeline.release(stage == 0 ? Tile::kStages - 1 : stage - 1);
    multiply_half<A, B, Tile, 1>(sums, odd, shared, stage, at, true);
    place.next();
}

// Waits for all products, so that sums may be used, and releases the last stage.
template <class Tile, class Sum>
NM_DEVICE void finish(Sum (&sums)[Tile::kDown][Tile::kSums], const Pipeline<Tile>& pipeline, const Place<Tile>& place) {
    wgmma_wait<0>();
    NM_UNROLL
    for (int i = 0; i < Tile::kDown; ++i) pin(sums[i]);
    pipeline.release(place.stage == 0 ? Tile::kStages - 1 : place.stage - 1);
}

// With kByColumn D is stored [m, n], and in 16 bits B lies by column.
template <class T, class Tile, bool kByColumn, class Work>
NM_DEVICE void multiply_all(const CUtensorMap& values, const CUtensorMap& dense, const CUtensorMap& out, const typename Kind<T>::Told& f, const Work& work) {
    using Sum = typename Kind<T>::Sum;
    constexpr bool kOfColumns = kByColumn && Tile::kBytes == 2, kPromotes = Kind<T>::kPromotes;
    static_assert(Tile::kBytes == Kind<T>::kBytes && Tile::kDown * Tile::kSums * (kPromotes ? 2 : 1) <= 192);
    extern __shared__ __align__(1024) uint8_t nm_stages[];
    const Pipeline<Tile> pipeline{shared_address(nm_stages)};
    const uint32_t rank = Tile::kCluster == 1 ? 0 : cluster_rank();
    if (threadIdx.x == 0) pipeline.init();
    cluster_barrier();
    if (threadIdx.x / 128 == Tile::kMultiply) {
        give_registers<40>();
        if (threadIdx.x % 128 == 0) copy<typename Kind<T>::Told, Tile, kOfColumns>(values, dense, f, work, pipeline, rank);
    } else {
        take_registers<232>();
        Place<Tile> place;
        Results<T, Tile, kByColumn> results(nm_stages + Tile::kStages * Tile::kStage);
        NM_ONE_BY_ONE
        for (int turn = work.start(); work.more(turn); turn = work.next(turn)) {
            const Origin along = work.origin(f, turn, rank);
            const int first = along.first, last = along.last;
            Sum sums[Tile::kDown][Tile::kSums];
            [[maybe_unused]] Sum promoted[kPromotes ? Tile::kDown : 1][kPromotes ? Tile::kSums : 1] = {};
            // words must not change while the next ones are loaded: their products are in flight
            uint32_t even[Tile::kDown], odd[Tile::kDown];
            NM_ONE_BY_ONE
            for (int slab = first; slab < last; slab += 2) {
                if constexpr (Tile::kBytes == 2) {
                    multiply<T, Tile, kOfColumns>(sums, even, nm_stages, pipeline, place, slab == first);
                    if (slab + 1 < last) multiply<T, Tile, kOfColumns>(sums, odd, nm_stages, pipeline, place, false);
                } else {
                    using A = typename Kind<T>::A;
                    using B = typename Kind<T>::B;
                    multiply_eight<A, B>(sums, even, odd, nm_stages, pipeline, place, kPromotes || slab == first);
                    if (slab + 1 < last) multiply_eight<A, B>(sums, even, odd, nm_stages, pipeline, place, false);
                }
                if constexpr (kPromotes) {
                    finish(sums, pipeline, place);
                    NM_UNROLL
                    for (int i = 0; i < Tile::kDown * Tile::kSums; ++i) promoted[i / Tile::kSums][i % Tile::kSums] += sums[i / Tile::kSums][i % Tile::kSums];
                }
            }
            if constexpr (!kPromotes) finish(sums, pipeline, place);
            uint32_t same = uint32_t(turn);
            pin(same);  // do not keep numbers that only the epilogue needs during the loop
            const Origin at = work.origin(f, int(same), rank);
            if constexpr (std::is_same_v<Work, Shares<Tile>>) {
                if (at.last - at.first < work.all.slabs) {
                    work.leave(int(same), rank, sums);
                    continue;
                }
            }
            if constexpr (kPromotes) {
                results.store(f, out, at, promoted);
            } else {
                results.store(f, out, at, sums);
            }
        }
        results.finish();
    }
    cluster_barrier();  // no block may exit while another copies to it or signals a stage
}

template <class T, class Tile, bool kByColumn>
__global__ void __cluster_dims__(Tile::kCluster, 1, 1) __launch_bounds__(Tile::kThreads, 1)
    wgmma_sp_kernel(const __grid_constant__ CUtensorMap values, const __grid_constant__ CUtensorMap dense, const __grid_constant__ CUtensorMap out,
                    const __grid_constant__ typename Kind<T>::Told f, int tiles) {
    multiply_all<T, Tile, kByColumn>(values, dense, out, f, Waves<Tile>{tiles});
}

template <class T, class Tile, bool kByColumn>
__global__ void __cluster_dims__(Tile::kCluster, 1, 1) __launch_bounds__(Tile::kThreads, 1)
    wgmma_stream_k_kernel(const __grid_constant__ CUtensorMap values, const __grid_constant__ CUtensorMap dense, const __grid_constant__ CUtensorMap out,
                          const __grid_constant__ typename Kind<T>::Told f, const __grid_constant__ StreamK all) {
    multiply_all<T, Tile, kByColumn>(values, dense, out, f, Shares<Tile>{all});
}

#endif

// There are as many clusters as can run concurrently, or as tiles; each then continues with the tile that many further.
template <class Tile, bool kByColumn, class T>
WgmmaLaunch launch_of(const GemmCall& call, int processors, Gemm<T>& f, Maps& maps) {
    const int parts = call.splits == kStreamK ? 1 : call.splits;
    const int64_t rows = cdiv(call.m, Tile::kRows * Tile::kCluster), cols = cdiv(call.n, Tile::kCols), tiles = rows * cols * parts;
    if (std::max({call.m, call.n, call.k, tiles * Tile::kCluster}) > 0x7fffffff) throw std::invalid_argument("gemm: sizes beyond 31 bits");
    GemmCall whole = call;
    whole.splits = parts;
    f = gemm_of<T>(whole, rows, cols);
    f.part = part_of(call.k / Tile::kDeep, parts);
    maps = maps_of<Tile>(call.values, call.dense, call.out, call.m, call.n, call.k, kByColumn);
    const int64_t clusters = call.splits == kStreamK ? stream_of<Tile>(call.m, call.n, call.k, processors).clusters
                                                     : std::min<int64_t>(tiles, std::max(1, processors / Tile::kCluster));
    return {int(tiles), int(clusters) * Tile::kCluster, Tile::kThreads, Tile::kShared};
}

}  // namespace

}  // namespace nm::cuda::gemm
