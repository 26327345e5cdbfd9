// Masks that are n:m along rows and along columns, tile by tile.
#include <algorithm>
#include <vector>

#include "assignment.h"
#include "../kernels.h"
#include "../stream.h"
#include "tiles.h"

namespace nm {
namespace {

// 2:4 for up to kLanes tiles side by side.
template <class T>
void mask_tiles(const T* w, int64_t cols, int64_t count, uint8_t* out, bool streamed) {
    constexpr int64_t width = 4 * kLanes;
    T padded[4 * width] = {};
    uint8_t flags[width];
    const bool partial = count < kLanes;
    for (int row = 0; row < 4 && partial; ++row) std::copy_n(w + row * cols, 4 * count, padded + row * width);
    const Uints found = partial ? best_masks(padded, width) : best_masks(w, cols);
    for (int row = 0; row < 4; ++row) {
        row_flags(found, row, flags);
        put(out + row * cols, flags, 4 * count, streamed);
    }
}

template <class T>
void tile_general(const T* w, int64_t cols, int n, int m, Assignment& solver, std::vector<float>& a, uint8_t* out) {
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < m; ++j) a[size_t(i * m + j)] = magnitude(to_float(w[i * cols + j]));
    }
    solver.solve(a.data(), n);
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < m; ++j) out[i * cols + j] = solver.kept(i, j);
    }
}

template <class T>
void mask_2_4(const T* w, int64_t rows, int64_t cols, uint8_t* out, int threads) {
    const int64_t across = cols / 4, blocks = (across + kLanes - 1) / kLanes;
    const bool streamed = rows * cols >= kStreamBytes;
    parallel_ranges(rows / 4 * blocks, 64 * kLanes, threads, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % blocks * kLanes, at = i / blocks * 4 * cols + 4 * first;
            mask_tiles(w + at, cols, std::min<int64_t>(kLanes, across - first), out + at, streamed);
        }
        if (streamed) stream_fence();
    });
}

// A tile costs about n * m^3 steps, so few of them make a chunk.
template <class T>
void mask_general(const T* w, int64_t rows, int64_t cols, int n, int m, uint8_t* out, int threads) {
    const int64_t across = cols / m;
    parallel_ranges(rows / m * across, int64_t(n) * m * m, threads, [=](int64_t begin, int64_t end) {
        Assignment solver(m);
        std::vector<float> a(size_t(m) * m);
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t at = tile / across * m * cols + tile % across * m;
            tile_general(w + at, cols, n, m, solver, a, out + at);
        }
    });
}

}  // namespace

namespace NM_ISA {

void transposable_mask(const void* w, int dtype, int64_t rows, int64_t cols, int n, int m, uint8_t* out, int threads) {
    check_pattern(n, m);
    if (rows == 0 || cols == 0) return;
    by_dtype(dtype, [&](auto element) {
        const auto* in = static_cast<const decltype(element)*>(w);
        if (n == 2 && m == 4) {
            mask_2_4(in, rows, cols, out, threads);
        } else {
            mask_general(in, rows, cols, n, m, out, threads);
        }
    });
}

}  // namespace NM_ISA
}  // namespace nm
