// Masks that are n:m along rows and along columns, tile by tile.
#include "../../core/transposable.h"

#include <algorithm>
#include <vector>

#include "assignment.h"
#include "../kernels.h"

namespace nm {
namespace {

template <class T>
void load_tile(const T* w, int64_t cols, int m, float* a) {
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < m; ++j) a[i * m + j] = magnitude(to_float(w[i * cols + j]));
    }
}

template <class T>
void tile_2_4(const T* w, int64_t cols, uint8_t* out) {
    float a[16];
    load_tile(w, cols, 4, a);
    const uint32_t mask = transposable_2_4(a);
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) out[i * cols + j] = (mask >> (4 * i + j)) & 1;
    }
}

template <class T>
void tile_general(const T* w, int64_t cols, int n, int m, Assignment& solver, std::vector<float>& a, uint8_t* out) {
    load_tile(w, cols, m, a.data());
    solver.solve(a.data(), n);
    for (int i = 0; i < m; ++i) {
        for (int j = 0; j < m; ++j) out[i * cols + j] = solver.kept(i, j);
    }
}

}  // namespace

namespace NM_ISA {

void transposable_mask(const void* w, int dtype, int64_t rows, int64_t cols, int n, int m, uint8_t* out, int threads) {
    check_pattern(n, m);
    if (rows == 0 || cols == 0) return;
    const int64_t across = cols / m, tiles = rows / m * across;
    // a general tile costs about n * m^3 steps, so few of them make a chunk
    const int64_t weight = n == 2 && m == 4 ? 64 : int64_t(n) * m * m;
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const T* in = static_cast<const T*>(w);
        parallel_ranges(tiles, weight, threads, [&](int64_t begin, int64_t end) {
            const bool general = !(n == 2 && m == 4);
            Assignment solver(general ? m : 0);
            std::vector<float> a(general ? size_t(m) * m : 0);
            for (int64_t tile = begin; tile < end; ++tile) {
                const int64_t at = tile / across * m * cols + tile % across * m;
                if (general) {
                    tile_general(in + at, cols, n, m, solver, a, out + at);
                } else {
                    tile_2_4(in + at, cols, out + at);
                }
            }
        });
    });
}

}  // namespace NM_ISA
}  // namespace nm
