// y = x Wᵀ + b for up to 16 tokens in 16 bits and any N:M: a block expands 32 rows of W in shared memory, up to 256 columns
// at a time, for the tensor cores. Meanwhile the packed bytes and the x of the next columns are loaded into registers. Common
// patterns are expanded in registers instead (linear_mma.cu).
//
// A block has 8 warps, 4 for each 16 rows; they alternate over steps of 16 columns, and their sums are added in order.
#include <algorithm>
#include <numeric>

#include "linear.h"
#include "ptx.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256, kRows = 32, kSharing = 4;
constexpr int kBlocks = 2;    // of a multiprocessor
constexpr int kCols = 256;    // of a tile, at most; a group has no more
constexpr int kStride = kCols + 8;  // elements, so that 8 rows use all banks
constexpr int kChunks = kRows * kCols / 8 / kThreads;  // of 8 values that a thread has, at most
constexpr int kTokens = 16;
constexpr int kPartTiles = 4;  // the fewest of a part

struct Plan {
    int groups;      // of a tile
    int part;        // tiles of a part of the columns
    int splits;      // parts
    int64_t blocks;  // of a part
};

Plan plan(const LinearCall& call) {
    // whole groups, and if possible whole chunks of 8 values
    const int even = 8 / std::gcd(8, call.n), most = kCols / call.m;
    Plan p{most >= even ? most / even * even : most, 1, 1, cdiv(call.rows, kRows)};
    const int64_t tiles = std::max<int64_t>(1, cdiv(cdiv(call.cols, call.m), p.groups));
    p.part = int(tiles);
    if (2 * p.blocks <= call.processors && tiles >= 2 * kPartTiles) {
        p.part = int(cdiv(tiles, std::min(call.processors / p.blocks, tiles / kPartTiles)));
        p.splits = int(cdiv(tiles, p.part));
    }
    return p;
}

template <class T>
struct Expand {
    const T* x;
    const T* values;
    const uint8_t* indices;
    Sums<T> sums;
    int64_t cols, kept, index_row;
    int n, m;
    bool wide_x, wide_values;  // 8 elements of a row may be read at once
    Plan plan;
};

// The expanded tile [row][column], and x [token][column].
template <class T>
struct Tiles {
    alignas(16) T w[kRows][kStride];
    alignas(16) T x[kTokens][kStride];
    float partial[kThreads / 32][16][17];
};

// A thread's loads for a tile: chunks of 8 values with their indices, and two pieces of 8 columns of x. The indices of a chunk
// loaded at once stay packed, others take a byte each.
template <class T>
struct Brought {
    T values[kChunks][8];
    uint8_t indices[kChunks][8];
    T x[2][8];
};

// A thread's chunk c of a tile.
struct Chunk {
    int row, k;     // the first value, in its row of the tile
    int64_t count;  // values that are there

    template <class T>
    NM_DEVICE Chunk(const Expand<T>& f, int64_t tile, int c) {
        const int width = f.plan.groups * f.n, chunks = (width + 7) / 8, e = int(threadIdx.x) + c * kThreads;
        row = e / chunks;
        k = e % chunks * 8;
        const int64_t left = f.kept - tile * width - k;
        count = row >= kRows ? 0 : left < width - k ? left : width - k;
    }
};

template <class T, int Bits>
NM_DEVICE void bring(const Expand<T>& f, int64_t row_0, int64_t tile, Brought<T>& b) {
    NM_UNROLL
    for (int c = 0; c < kChunks; ++c) {
        const Chunk chunk(f, tile, c);
        const int64_t row = row_0 + chunk.row < f.sums.rows ? row_0 + chunk.row : f.sums.rows - 1;
        const int64_t first = tile * (f.plan.groups * f.n) + chunk.k;
        const uint8_t* indices = f.indices + row * f.index_row;
        load_some<8>(f.values + row * f.kept + first, b.values[c], chunk.count, f.wide_values);
        if (f.wide_values) {
            load_some<Bits>(indices + first / 8 * Bits, b.indices[c], chunk.count > 0 ? Bits : 0, true);
        } else {
            NM_UNROLL
            for (int i = 0; i < 8; ++i) b.indices[c][i] = i < chunk.count ? uint8_t(get_index(indices, first + i, Bits)) : uint8_t(0);
        }
    }
    const int cols = f.plan.groups * f.m;
    NM_UNROLL
    for (int i = 0; i < 2; ++i) {
        const int e = int(threadIdx.x) + i * kThreads, token = e / (kCols / 8), column = e % (kCols / 8) * 8;
        const int64_t at = tile * cols + column, left = f.cols - at;
        const int64_t count = token < f.sums.tokens ? left < cols - column ? left : cols - column : 0;
        load_some<8>(f.x + token * f.cols + at, b.x[i], count, f.wide_x);
    }
}

// Scatters values into the zeroed tile; those whose column does not exist are left out.
template <class T, int Bits>
NM_DEVICE void scatter(const Expand<T>& f, int64_t tile, const Brought<T>& b, Tiles<T>& tiles) {
    const int64_t left = f.cols - tile * (f.plan.groups * f.m);
    NM_UNROLL
    for (int c = 0; c < kChunks; ++c) {
        const Chunk chunk(f, tile, c);
        int column = chunk.k / f.n * f.m, in_group = chunk.k % f.n;
        NM_UNROLL
        for (int i = 0; i < 8; ++i) {
            const int place = f.wide_values ? b.indices[c][i * Bits / 8] >> (i * Bits % 8) & ((1 << Bits) - 1) : b.indices[c][i];
            if (i < chunk.count && place < f.m && column + place < left) tiles.w[chunk.row][column + place] = b.values[c][i];
            if (++in_group == f.n) {
                in_group = 0;
                column += f.m;
            }
        }
    }
}

template <class T, int Bits>
__global__ void __launch_bounds__(kThreads, kBlocks) expand_kernel(Expand<T> f) {
    using Shared = Tiles<T>;
    NM_SHARED(Shared, tiles);
    const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32, turn = warp % kSharing;
    const int part = int(blockIdx.x / f.plan.blocks);
    const int64_t row_0 = blockIdx.x % f.plan.blocks * kRows, cols = f.plan.groups * f.m;
    const int64_t count = (f.cols + cols - 1) / cols, first = int64_t(part) * f.plan.part;
    const int64_t last = first + f.plan.part < count ? first + f.plan.part : count;
    // the rows that the lane names to ldmatrix: of W by 8 rows, then by 8 columns; of x by 8 columns, then by 8 tokens
    const T* a_row = &tiles.w[warp / kSharing * 16 + lane % 16][lane / 16 * 8];
    const T* b_row = &tiles.x[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8];
    Brought<T> brought;
    float sums[2][4] = {};
    if (first < last) bring<T, Bits>(f, row_0, first, brought);
    for (int64_t tile = first; tile < last; ++tile) {
        for (int e = thread; e < kRows * kStride / 8; e += kThreads) store_word<16>(&tiles.w[0][0] + e * 8, Word<16>{});
        NM_UNROLL
        for (int i = 0; i < 2; ++i) {
            const int e = thread + i * kThreads;
            store_wide<8>(&tiles.x[e / (kCols / 8)][e % (kCols / 8) * 8], brought.x[i]);
        }
        __syncthreads();
        scatter<T, Bits>(f, tile, brought, tiles);
        if (tile + 1 < last) bring<T, Bits>(f, row_0, tile + 1, brought);
        __syncthreads();
        for (int at = turn * 16; at < cols; at += kSharing * 16) {
            uint32_t a[4], b[4];
            ldmatrix(a, a_row + at);
            ldmatrix(b, b_row + at);
            mma_m16n8k16<T>(sums[0], a, {b[0], b[1]});
            if (f.sums.tokens > 8) mma_m16n8k16<T>(sums[1], a, {b[2], b[3]});
        }
        __syncthreads();
    }
    NM_UNROLL
    for (int i = 0; i < 8; ++i) tiles.partial[warp][i / 4 * 8 + lane % 4 * 2 + i % 2][lane / 4 + i % 4 / 2 * 8] = sums[i / 4][i % 4];
    __syncthreads();
    for (int e = thread; e < kRows * int(f.sums.tokens); e += kThreads) {
        const int token = e / kRows, row = e % kRows;
        if (row_0 + row >= f.sums.rows) continue;
        float sum = 0.0f;
        for (int k = 0; k < kSharing; ++k) sum += tiles.partial[row / 16 * kSharing + k][token][row % 16];
        f.sums.store(sum, token, row_0 + row, part);
    }
}

// f(element) for the dtypes of tensor cores.
template <class F>
void by_half(int dtype, const F& f) {
    if (dtype == kBFloat16) return f(bf16{});
    if (dtype == kFloat16) return f(fp16{});
}

}  // namespace

int linear_expand_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors) {
    check_pattern(n, m);
    if ((dtype != kBFloat16 && dtype != kFloat16) || tokens > kTokens) return 0;
    return plan(sizes_of(dtype, tokens, rows, cols, n, m, processors)).splits;
}

void linear_expand(const LinearCall& call, const Queue& queue) {
    if (call.rows == 0 || call.tokens == 0) return;
    by_half(call.dtype, [&](auto element) {
        using T = decltype(element);
        const Plan p = plan(call);
        const int64_t kept = cdiv(call.cols, call.m) * call.n;
        const int bits = index_bits(call.m);
        const bool wide = multiples_of_16(call.values) && uintptr_t(call.indices) % 8 == 0 && kept % 8 == 0 && p.groups * call.n % 8 == 0;
        const bool wide_x = multiples_of_16(call.x) && call.cols % 8 == 0 && p.groups * call.m % 8 == 0;
        const Expand<T> f{static_cast<const T*>(call.x), static_cast<const T*>(call.values), call.indices, sums_of<T>(call), call.cols, kept,
                          index_bytes(kept, bits), call.n, call.m, wide_x, wide, p};
        const auto start = [&](void (*kernel)(Expand<T>)) { launch("linear_expand_kernel", kernel, {p.blocks * p.splits, kThreads}, queue, f); };
        bits == 2 ? start(expand_kernel<T, 2>) : bits == 4 ? start(expand_kernel<T, 4>) : start(expand_kernel<T, 8>);
    });
    if (call.splits > 1) finish_parts(call, queue);
}

}  // namespace nm::cuda
