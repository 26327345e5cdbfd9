// 8-bit GEMMs with wgmma.sp: e4m3 and e5m2, mixed as training needs, with or without promoted sums, and int8.
#include "../../core/eight_bit.h"
#include "wgmma_kernel.h"

namespace nm::cuda {

namespace gemm {

namespace {

// Calls f(a, b, by column) for the pairs that have kernels: of fprop and dgrad, stored transposed, and of wgrad. Returns false if
// there is none.
template <class F>
bool by_types(int a, int b, bool by_column, const F& f) {
    if (!by_column && a == kE4m3 && b == kE4m3) return f(e4m3{}, e4m3{}, std::false_type{}), true;
    if (!by_column && a == kE4m3 && b == kE5m2) return f(e4m3{}, e5m2{}, std::false_type{}), true;
    if (!by_column && a == kE5m2 && b == kE5m2) return f(e5m2{}, e5m2{}, std::false_type{}), true;
    if (!by_column && a == kInt8 && b == kInt8) return f(int8_t{}, int8_t{}, std::false_type{}), true;
    if (by_column && a == kE5m2 && b == kE5m2) return f(e5m2{}, e5m2{}, std::true_type{}), true;
    if (by_column && a == kE5m2 && b == kE4m3) return f(e5m2{}, e4m3{}, std::true_type{}), true;
    return false;
}

// Calls visit(kind, tile, by column, kernel, arguments) for the kernel of a call.
template <class F>
void by_kernel(const ScaledCall& call, int processors, const F& visit) {
    const bool found = by_types(call.a, call.b, call.gemm.by_column, [&](auto a, auto b, auto by_column) {
        const auto with = [&](auto promotes) {
            using T = EightBits<decltype(a), decltype(b), promotes>;
            by_eight_tile<promotes>(call.gemm.tile, [&](auto tile) {
                ScaledGemm f;
                Maps maps;
                const WgmmaLaunch grid = launch_of<decltype(tile), by_column>(call.gemm, processors, f, maps);
                f.row_steps = call.row_steps, f.col_steps = call.col_steps;
                f.row_stride = call.by_row, f.col_stride = call.by_col;
                visit(T{}, tile, by_column, grid, f, maps);
            });
        };
        if constexpr (!std::is_same_v<decltype(a), int8_t>) {
            if (call.promotes) return with(std::true_type{});
        }
        with(std::false_type{});
    });
    if (!found) throw std::invalid_argument("gemm: 8-bit wgmma.sp has no kernel for these types");
}

void check(const ScaledCall& call) {
    const GemmCall& gemm = call.gemm;
    const bool plain = !gemm.bias && !gemm.residual && gemm.activation == kNone;
    if (gemm.m % 64 || gemm.k % 128 || gemm.k == 0 || (gemm.by_column && gemm.n % 8)) throw std::invalid_argument("gemm: sizes are not whole tiles");
    if (gemm.unrounded != (gemm.dtype == kFloat32) || (gemm.dtype != kBFloat16 && (gemm.dtype != kFloat32 || !plain))) throw std::invalid_argument("gemm: 8-bit wgmma.sp has no such result");
}

}  // namespace

}  // namespace gemm

bool gemm_wgmma_8bit_has(int a, int b, bool by_column) {
    return gemm::by_types(a, b, by_column, [](auto, auto, auto) {});
}

std::pair<int, int> gemm_wgmma_8bit_plan(int64_t m, int64_t n, int64_t k, bool promotes, const Gpu& gpu) {
    const gemm::Plan plan = gemm::choose_eight(m, n, k, promotes, gpu);
    return {plan.tile, plan.splits};
}

WgmmaLaunch gemm_wgmma_8bit_launch(const ScaledCall& call, int processors, std::vector<int64_t>* maps, std::string* parameter) {
    WgmmaLaunch result{};
    gemm::check(call);
    gemm::by_kernel(call, processors, [&](auto, auto, auto, const WgmmaLaunch& grid, const gemm::ScaledGemm& f, const gemm::Maps& told) {
        result = grid;
        for (const gemm::Map& map : {told.values, told.dense, told.out}) {
            maps->insert(maps->end(), {int64_t(map.address), map.inner, map.outer, map.box_inner, map.box_outer, map.swizzle});
        }
        parameter->assign(reinterpret_cast<const char*>(&f), sizeof f);
    });
    return result;
}

void gemm_wgmma_sp_8bit(const ScaledCall& call, const Queue& queue) {
    if (call.gemm.m == 0 || call.gemm.n == 0) return;
    gemm::check(call);
#if defined(NM_SM90A)
    gemm::by_kernel(call, gpu(queue.device).processors, [&](auto kind, auto tile, auto by_column, const WgmmaLaunch& grid, const gemm::ScaledGemm& f,
                                                            const gemm::Maps& maps) {
        launch("wgmma_sp_kernel", gemm::wgmma_sp_kernel<decltype(kind), decltype(tile), by_column>, {grid.blocks, grid.threads, size_t(grid.shared)},
               queue, gemm::encoded(maps.values, kBFloat16, queue), gemm::encoded(maps.dense, kBFloat16, queue),
               gemm::encoded(maps.out, kBFloat16, queue), f, grid.tiles);
    });
    gemm::finish_parts(call.gemm, queue);
#else
    (void)queue;
    throw std::runtime_error("wgmma_sp_kernel: " + wgmma_obstacle(0));
#endif
}

}  // namespace nm::cuda
