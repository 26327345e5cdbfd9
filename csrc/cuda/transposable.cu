// The best 2:4 masks of 4x4 tiles: a thread reads 16 bytes of each of four rows and searches in registers.
#include "../core/dispatch.h"
#include "../core/transposable.h"
#include "kernels.h"
#include "launch.h"
#include "memory.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;

// Bit j of a row of a mask as byte j.
NM_DEVICE uint32_t spread(uint32_t row) { return row * 0x204081u & 0x01010101u; }

// A block processes 256 pieces of four rows by 16 bytes, 2^width of them per row. `across` blocks cover a row.
template <class T>
__global__ void __launch_bounds__(kThreads) transposable_kernel(const T* w, uint8_t* out, int64_t bands, int64_t cols, int across, int width, bool wide) {
    constexpr int kCols = 16 / int(sizeof(T)), kTiles = kCols / 4;
    const int64_t band = (int64_t(blockIdx.x / unsigned(across)) << (8 - width)) + (threadIdx.x >> width);
    const int64_t col = ((int64_t(blockIdx.x % unsigned(across)) << width) + (threadIdx.x & ((1u << width) - 1u))) * kCols;
    if (band >= bands || col >= cols) return;
    const int64_t at = band * 4 * cols + col;
    T x[4][kCols];
    NM_UNROLL
    for (int row = 0; row < 4; ++row) load_some<kCols>(w + at + row * cols, x[row], cols - col, wide);
    uint32_t mask[4][kTiles];
    NM_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
        float a[16];
        NM_UNROLL
        for (int i = 0; i < 16; ++i) a[i] = to_float(x[i / 4][4 * tile + i % 4]);
        const TileRows found = transposable_rows(a);
        NM_UNROLL
        for (int row = 0; row < 4; ++row) mask[row][tile] = spread(found.row[row]);
    }
    NM_UNROLL
    for (int row = 0; row < 4; ++row) {
        uint8_t flags[kCols];
        memcpy(flags, mask[row], kCols);
        store_some<kCols>(out + at + row * cols, flags, cols - col, wide);
    }
}

}  // namespace

void transposable_mask(const void* w, int dtype, int64_t rows, int64_t cols, uint8_t* out, const Queue& queue) {
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const int64_t bands = rows / 4, pieces = cdiv(cols * int64_t(sizeof(T)), 16);
        int width = 0;
        while (width < 8 && (int64_t(1) << width) < pieces) ++width;
        const int64_t across = cdiv(pieces, int64_t(1) << width), down = cdiv(bands, int64_t(kThreads) >> width);
        const bool wide = multiples_of_16(w, cols * int64_t(sizeof(T)), uintptr_t(out) * sizeof(T));
        launch("transposable_kernel", transposable_kernel<T>, {across * down, kThreads}, queue, static_cast<const T*>(w), out, bands, cols,
               int(across), width, wide);
    });
}

}  // namespace nm::cuda
