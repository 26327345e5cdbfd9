// 16-bit GEMMs with wgmma.sp, and their host interface.
#include "wgmma_kernel.h"

namespace nm::cuda {

namespace gemm {

namespace {

// Calls visit(tile, by column, kernel, arguments) for the kernel of a call.
template <class T, class F>
void by_kernel(const GemmCall& call, int processors, const F& visit) {
    by_wide_tile(call.tile, [&](auto tile) {
        using Tile = decltype(tile);
        Gemm<T> f;
        Maps maps;
        if (!call.by_column) {
            const WgmmaLaunch grid = launch_of<Tile, false>(call, processors, f, maps);
            return visit(tile, std::false_type{}, grid, f, maps);
        }
        if constexpr (takes_columns<Tile>()) {
            const WgmmaLaunch grid = launch_of<Tile, true>(call, processors, f, maps);
            return visit(tile, std::true_type{}, grid, f, maps);
        }
        throw std::invalid_argument("gemm: the thin tile has no way for operands by column");
    });
}

void check(const GemmCall& call) {
    if (call.warps != 4) throw std::invalid_argument("gemm: wgmma.sp reads metadata in its own order");
    if (call.m % 64 || call.k % kDepth || call.k == 0 || (call.by_column && call.n % 8)) throw std::invalid_argument("gemm: sizes are not whole tiles");
    if (call.unrounded && !call.by_column) throw std::invalid_argument("gemm: only results by column are stored unrounded");
}

template <class T>
void run(const GemmCall& call, const Queue& queue) {
#if defined(NM_SM90A)
    by_kernel<T>(call, gpu(queue.device).processors, [&](auto tile, auto by_column, const WgmmaLaunch& grid, const Gemm<T>& f, const Maps& maps) {
        using Tile = decltype(tile);
        launch("wgmma_sp_kernel", wgmma_sp_kernel<T, Tile, by_column>, {grid.blocks, grid.threads, size_t(grid.shared)}, queue,
               encoded(maps.values, call.dtype, queue), encoded(maps.dense, call.dtype, queue), encoded(maps.out, call.dtype, queue), f, grid.tiles);
    });
#else
    (void)call, (void)queue;
    throw std::runtime_error("wgmma_sp_kernel: " + wgmma_obstacle(0));
#endif
}

}  // namespace

}  // namespace gemm

std::string wgmma_obstacle([[maybe_unused]] int device) {
#if defined(NM_EMULATED)
    return "the emulator has no wgmma";
#elif defined(NM_SM90A)
    const int found = gpu(device).capability;
    if (found != 90) return "wgmma.sp is of compute capability 9.0, and this GPU has " + std::to_string(found / 10) + "." + std::to_string(found % 10);
    return gemm::can_encode() ? "" : "the driver has no cuTensorMapEncodeTiled, which it has from CUDA 12.0 on";
#else
    return "this build has no code for sm_90a";
#endif
}

std::pair<int, int> gemm_wgmma_plan(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu) {
    const gemm::Plan plan = gemm::choose_wide(m, n, k, by_column, gpu);
    return {plan.tile, plan.splits};
}

WgmmaLaunch gemm_wgmma_launch(const GemmCall& call, int processors, std::vector<int64_t>* maps, std::string* parameter) {
    WgmmaLaunch result{};
    gemm::check(call);
    gemm::by_kernel<bf16>(call, processors, [&](auto, auto, const WgmmaLaunch& grid, const gemm::Gemm<bf16>& f, const gemm::Maps& told) {
        result = grid;
        for (const gemm::Map& map : {told.values, told.dense, told.out}) {
            maps->insert(maps->end(), {int64_t(map.address), map.inner, map.outer, map.box_inner, map.box_outer, map.swizzle});
        }
        parameter->assign(reinterpret_cast<const char*>(&f), sizeof f);
    });
    return result;
}

void gemm_wgmma_sp(const GemmCall& call, const Queue& queue) {
    if (call.m == 0 || call.n == 0) return;
    gemm::check(call);
    if (call.dtype == kBFloat16) {
        gemm::run<bf16>(call, queue);
    } else {
        gemm::run<fp16>(call, queue);
    }
    gemm::finish_parts(call, queue);
}

}  // namespace nm::cuda
