// D = A B by mma.sp::ordered_metadata.m16n8k32, from sm_80 on; on sm_90 at about half the speed of wgmma.sp.
#include <stdexcept>

#include "epilogue.h"
#include "fragments.h"
#include "plan.h"
#include "stages.h"

namespace nm::cuda {

namespace gemm {

namespace {

// Stages and barriers. There is a barrier before turn 3 of slab s. By then slab s + 1 has arrived, because each thread has waited
// for its copies (kStages + s groups were started, and all but the last kStages - 2 awaited), and slab s has been read, because
// turn 3's operands were loaded before turn 2. So its place is free for slab s + kStages. One more barrier follows the last slab:
// sums are written where a slower warp may still read operands. The emulator cannot detect a missing one, because its warps keep
// step.
template <class T, class Tile, bool kByColumn>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks) mma_sp_kernel(Gemm<T> f) {
    NM_DYNAMIC_SHARED(uint8_t, shared);
    const Origin origin = f.origin(blockIdx.x, Tile::kRows, Tile::kCols, kDepth);
    float sums[Tile::kDown][Tile::kAcross][4] = {};
    if (origin.first < origin.last) {
        Stages<T, Tile, kByColumn> stages(f, origin, shared);
        NM_UNROLL
        for (int i = 0; i < Tile::kStages; ++i) stages.start();
        Fragments<T, Tile, kByColumn> fragments;
        cp_async_wait<Tile::kStages - 1>();
        __syncthreads();
        fragments.load_first(shared);
        uint32_t stage = 0;
        NM_ONE_BY_ONE
        for (int slab = origin.first; slab < origin.last; ++slab) {
            fragments.begin_slab();
            fragments.template load<1>(shared + stage);
            fragments.template multiply<0>(sums);
            fragments.template load<2>(shared + stage);
            fragments.template multiply<1>(sums);
            fragments.template load<3>(shared + stage);
            fragments.template multiply<2>(sums);
            if (slab + 1 < origin.last) {
                cp_async_wait<Tile::kStages - 2>();
                __syncthreads();
                stage = stage == (Tile::kStages - 1) * Tile::kStage ? 0 : stage + Tile::kStage;
                fragments.load_first(shared + stage);
                stages.start();
            }
            fragments.template multiply<3>(sums);
        }
        cp_async_wait<0>();
        __syncthreads();
    }
    store_sums<T, Tile, kByColumn>(f, origin, sums, shared);
}

template <class T, class Tile, bool kByColumn>
void run(const GemmCall& call, const Queue& queue) {
    const int64_t rows = cdiv(call.m, Tile::kRows), cols = cdiv(call.n, Tile::kCols);
    if (rows * cols * call.splits > 0x7fffffff) throw std::invalid_argument("gemm: more blocks than a grid has");
    const Gemm<T> f = gemm_of<T>(call, rows, cols);
    launch("mma_sp_kernel", mma_sp_kernel<T, Tile, kByColumn>, {rows * cols * call.splits, Tile::kThreads, Tile::kShared}, queue, f);
}

template <class T>
void by_way(const GemmCall& call, const Queue& queue) {
    by_tile(call.tile, [&](auto tile) {
        using Tile = decltype(tile);
        if (!call.by_column) return run<T, Tile, false>(call, queue);
        if constexpr (Tile::kWarpCols == 64) return run<T, Tile, true>(call, queue);
        throw std::invalid_argument("gemm: the small tile has no way for operands by column");
    });
}

}  // namespace

}  // namespace gemm

std::pair<int, int> gemm_plan(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu) {
    const gemm::Plan plan = gemm::choose(m, n, k, by_column, gpu);
    return {plan.tile, plan.splits};
}

void gemm_mma_sp(const GemmCall& call, const Queue& queue) {
    if (call.m == 0 || call.n == 0) return;
    if (call.m % 16 || call.k % gemm::kDepth || (call.by_column && call.n % 8)) throw std::invalid_argument("gemm: sizes are not whole tiles");
    if (call.unrounded && !call.by_column) throw std::invalid_argument("gemm: only results by column are stored unrounded");
    if (call.m % (16 * call.warps)) throw std::invalid_argument("gemm: metadata for whole warpgroups, and rows for a part of one");
    if (call.dtype == kBFloat16) {
        gemm::by_way<bf16>(call, queue);
    } else {
        gemm::by_way<fp16>(call, queue);
    }
    gemm::finish_parts(call, queue);
}

}  // namespace nm::cuda
