// Converts canonical 2:4 indices to a tensor-core layout, a permutation of 16-bit units, or of words for 8-bit operands, defined in
// reference/layouts.py. Nothing is checked: invalid pairs stay invalid.
#include <stdexcept>

#include "kernels.h"
#include "launch.h"
#include "memory.h"
#include "packing.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;

// A thread reads the 8 bytes of rows g and g + 8 of a tile for 64 columns and writes four words. In a warp, eight neighbouring
// threads write 128 bytes, and four of the same row read 32.
__global__ void __launch_bounds__(kThreads) metadata_kernel(const uint8_t* indices, int64_t rows, int64_t across, int layout, bool wide, uint32_t* out) {
    const int64_t quads = (across + 3) / 4, at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
    const int lane = int(threadIdx.x) % 32, g = lane % 8;
    const int64_t i = at / quads, j = at % quads * 4 + lane / 8;
    if (i >= rows / 16 || j >= across) return;
    uint8_t upper[8], lower[8];
    load_some<8>(indices + ((i * 16 + g) * across + j) * 8, upper, 8, wide);
    load_some<8>(indices + ((i * 16 + g + 8) * across + j) * 8, lower, 8, wide);
    uint32_t words[4];
    NM_UNROLL
    for (int t = 0; t < 4; ++t) {
        words[t] = uint32_t(upper[2 * t]) | uint32_t(upper[2 * t + 1]) << 8 | uint32_t(lower[2 * t]) << 16 | uint32_t(lower[2 * t + 1]) << 24;
    }
    const int64_t tile = layout == kMmaSp ? i * across + j : (i / 4 * across + j) * 4 + i % 4;
    store_global<4>(out + tile * 32 + g * 4, words);
}

// The layout of 8-bit operands, in whole words: a thread reads the four words of rows g and g + 8 of a tile for 128 columns.
__global__ void __launch_bounds__(kThreads) metadata_8bit_kernel(const uint8_t* indices, int64_t rows, int64_t across, bool wide, uint32_t* out) {
    const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 8, tile = at / across, j = at % across;
    const int g = int(threadIdx.x) % 8;
    if (tile >= rows / 16) return;
    uint8_t upper[16], lower[16];
    load_some<16>(indices + ((tile * 16 + g) * across + j) * 16, upper, 16, wide);
    load_some<16>(indices + ((tile * 16 + g + 8) * across + j) * 16, lower, 16, wide);
    uint32_t from[2][4];
    memcpy(from[0], upper, 16);
    memcpy(from[1], lower, 16);
    // among lanes 4 g to 4 g + 3, odd ones have the lower row, the upper two the second half of an instruction's columns
    NM_UNROLL
    for (int step = 0; step < 2; ++step) {
        const uint32_t words[4] = {from[0][2 * step], from[1][2 * step], from[0][2 * step + 1], from[1][2 * step + 1]};
        store_global<4>(out + (tile / 4 * across + j) * 256 + step * 128 + tile % 4 * 32 + g * 4, words);
    }
}

}  // namespace

void metadata(const uint8_t* indices, int64_t rows, int64_t cols, int layout, uint32_t* out, const Queue& queue) {
    if (layout == kWgmmaSp8) {
        if (rows % 64 || cols % 128) throw std::invalid_argument("metadata: sizes are not whole tiles");
        const int64_t across = cols / 128;
        return launch("metadata_8bit_kernel", metadata_8bit_kernel, {cdiv(rows / 2 * across, kThreads), kThreads}, queue, indices, rows, across,
                      uintptr_t(indices) % 16 == 0, out);
    }
    if (layout != kMmaSp && layout != kWgmmaSp) throw std::invalid_argument("metadata: layout " + std::to_string(layout) + " is not known");
    if (rows % (layout == kMmaSp ? 16 : 64) || cols % 64) throw std::invalid_argument("metadata: sizes are not whole tiles");
    const int64_t across = cols / 64, warps = rows / 16 * cdiv(across, 4);
    const bool wide = uintptr_t(indices) % 8 == 0;
    launch("metadata_kernel", metadata_kernel, {cdiv(warps * 32, kThreads), kThreads}, queue, indices, rows, across, layout, wide, out);
}

}  // namespace nm::cuda
