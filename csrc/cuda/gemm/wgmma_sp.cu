// 16-bit GEMMs with wgmma.sp, and their host interface.
#include "wgmma_kernel.h"

namespace nm::cuda {

namespace gemm {

namespace {

constexpr int kFinishThreads = 256;  // those that multiply

// Adds the sums of the pieces of a tile of stream-K: four of a thread of a block, in the order of k.
template <class T>
__global__ void __launch_bounds__(kFinishThreads) stream_k_finish_kernel(Sums<T> sums, StreamK work, Gemm<T> f, bool by_column, int rows, int cols, int cluster) {
    const int area = rows * cols, fours = area / 4;
    const int64_t at = int64_t(blockIdx.x) * kFinishThreads + threadIdx.x;
    const int block = int(at / fours), four = int(at - int64_t(block) * fours), rank = block % cluster, tile = work.whole + block / cluster;
    const int first = (tile - work.whole) * work.slabs / work.share, last = ((tile - work.whole + 1) * work.slabs - 1) / work.share;
    if (first == last) return;  // the tile is one piece
    float d[4];
    for (int i = first; i <= last; ++i) {
        float more[4];
        load_streamed<4>(work.sums + int64_t(work.place(i, tile) * cluster + rank) * area + 4 * four, more);
        for (int e = 0; e < 4; ++e) d[e] = i == first ? more[e] : d[e] + more[e];
    }
    // register 4 j of thread 128 g + 32 w + 4 y + x is row 64 (kDown g + i) + 16 w + y, column 8 j + 2 x, of instruction i; see wgmma_sp
    const int thread = four % kFinishThreads, down = rows / 128, quad = four / kFinishThreads, of = quad / (cols / 8);
    Origin origin = f.origin(unsigned(tile), rows * cluster, cols, kDepth);
    origin.row += rank * rows + (thread / 128 * down + of) * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
    origin.col += quad % (cols / 8) * 8 + thread % 4 * 2;
    for (int e = 0; e < 4; ++e) {
        const int64_t row = origin.row + e / 2 * 8, col = origin.col + e % 2;
        if (row < f.m && col < f.n) sums.finish(d[e], by_column ? row * f.n + col : col * f.m + row, by_column ? col : row);
    }
}

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

// How stream-K divides a call, with its workspace.
template <class Tile>
StreamK stream_in(const GemmCall& call, int processors) {
    StreamK work = stream_of<Tile>(call.m, call.n, call.k, processors);
    work.sums = call.parts;
    return work;
}

// D of the tiles that are divided.
template <class T>
void finish_stream(const GemmCall& call, int processors, const Queue& queue) {
    by_wide_tile(call.tile, [&](auto shape) {
        using Tile = decltype(shape);
        const StreamK work = stream_in<Tile>(call, processors);
        const int64_t rows = cdiv(call.m, Tile::kRows * Tile::kCluster), cols = cdiv(call.n, Tile::kCols);
        const int64_t fours = int64_t(work.units / work.slabs) * Tile::kCluster * (Tile::kRows * Tile::kCols / 4);
        const Sums<T> sums{static_cast<T*>(call.out), static_cast<const T*>(call.bias), static_cast<const T*>(call.residual), nullptr, 0, 0, call.activation};
        Gemm<T> whole{};  // for its order of tiles
        whole.m = call.m, whole.n = call.n, whole.k = call.k, whole.row_tiles = int(rows), whole.col_tiles = int(cols);
        whole.part = work.slabs;
        launch("stream_k_finish_kernel", stream_k_finish_kernel<T>, {fours / kFinishThreads, kFinishThreads}, queue, sums, work, whole,
               call.by_column, int(Tile::kRows), int(Tile::kCols), int(Tile::kCluster));
    });
}

template <class T>
void run(const GemmCall& call, const Queue& queue) {
#if defined(NM_SM90A)
    by_kernel<T>(call, gpu(queue.device).processors, [&](auto tile, auto by_column, const WgmmaLaunch& grid, const Gemm<T>& f, const Maps& maps) {
        using Tile = decltype(tile);
        const Grid blocks{grid.blocks, grid.threads, size_t(grid.shared)};
        const CUtensorMap values = encoded(maps.values, call.dtype, queue), dense = encoded(maps.dense, call.dtype, queue);
        const CUtensorMap out = encoded(maps.out, call.dtype, queue);
        if (call.splits != kStreamK) return launch("wgmma_sp_kernel", wgmma_sp_kernel<T, Tile, by_column>, blocks, queue, values, dense, out, f, grid.tiles);
        const StreamK work = stream_in<Tile>(call, gpu(queue.device).processors);
        launch("wgmma_stream_k_kernel", wgmma_stream_k_kernel<T, Tile, by_column>, blocks, queue, values, dense, out, f, work);
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

StreamKPlan gemm_stream_k_plan(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu) {
    const gemm::WidePlan plan = gemm::choose_stream(m, n, k, by_column, gpu);
    StreamKPlan result{plan.tile, 0, plan.cycles / gemm::choose_wide(m, n, k, by_column, gpu).cycles};
    gemm::by_wide_tile(plan.tile, [&](auto tile) {
        using Tile = decltype(tile);
        result.floats = gemm::stream_floats<Tile>(gemm::stream_of<Tile>(m, n, k, gpu.processors));
    });
    return result;
}

WgmmaLaunch gemm_wgmma_launch(const GemmCall& call, int processors, std::vector<int64_t>* maps, std::string* parameter) {
    WgmmaLaunch result{};
    gemm::check(call);
    gemm::by_kernel<bf16>(call, processors, [&](auto tile, auto, const WgmmaLaunch& grid, const gemm::Gemm<bf16>& f, const gemm::Maps& told) {
        result = grid;
        for (const gemm::Map& map : {told.values, told.dense, told.out}) {
            maps->insert(maps->end(), {int64_t(map.address), map.inner, map.outer, map.box_inner, map.box_outer, map.swizzle});
        }
        parameter->assign(reinterpret_cast<const char*>(&f), sizeof f);
        if (call.splits != gemm::kStreamK) return;
        const gemm::StreamK work = gemm::stream_in<decltype(tile)>(call, processors);
        parameter->append(reinterpret_cast<const char*>(&work), sizeof work);
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
#if defined(NM_SM90A)
    if (call.splits == gemm::kStreamK) return gemm_stream_k_finish(call, gpu(queue.device).processors, queue);
#endif
    gemm::finish_parts(call, queue);
}

void gemm_stream_k_finish(const GemmCall& call, int processors, const Queue& queue) {
    if (call.unrounded) return gemm::finish_stream<float>(call, processors, queue);
    if (call.dtype == kBFloat16) return gemm::finish_stream<bf16>(call, processors, queue);
    gemm::finish_stream<fp16>(call, processors, queue);
}

}  // namespace nm::cuda
