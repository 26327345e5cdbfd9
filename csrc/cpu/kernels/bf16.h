// What the bf16 GEMMs with a compressed operand have in common: how the dense operand is packed into tiles, and how tiles
// of results become rows of C.
#pragma once

#include <algorithm>

#include "../caches.h"
#include "../kernels.h"
#include "../stream.h"
#include "scratch.h"
#include "simd/bf16_expand.h"
#include "simd/bf16_product.h"
#include "simd/simd.h"

namespace nm {
namespace {

// C [outputs, tokens] = W B: W is the compressed matrix, or its transpose. Element (k, t) of B is b[k * b_row + t * b_col], C
// likewise, in fp32 if it is not rounded.
struct Bf16Gemm {
    StoredBf16 a;
    const bf16* b;
    int64_t b_row, b_col;
    const bf16* bias;  // one per output, or null
    void* c;
    int64_t c_row, c_col;
    int64_t outputs, depth, tokens;
    bool unrounded;

    Bf16Gemm(const SpmmCall& call, int n, int m, bool transposed)
        : a(call.values, call.indices, call.rows, call.cols, n, m), b(static_cast<const bf16*>(call.b)), b_row(call.b_row), b_col(call.b_col),
          bias(static_cast<const bf16*>(call.bias)), c(call.c), c_row(call.c_row), c_col(call.c_col),
          outputs(transposed ? call.cols : call.rows), depth(transposed ? call.rows : call.cols), tokens(call.tokens), unrounded(call.unrounded) {}
};

// B in tiles of 16 tokens, for each of them all depths, zeros past the last. As the right side a tile holds its tokens' numbers in
// pairs, [depth / 2][width][2], as the left side in rows, [depth / 32][16][32] (simd/amx.h).
struct PackedBf16 {
    const bf16* at;
    int width;                     // tokens of a tile: 16, or all if there are fewer and they come in pairs
    int64_t tiles, tile, steps;    // elements of a tile, steps of it

    // Tiles from `first` on, at step `step`.
    Side side(int64_t first, int64_t step) const { return {at + first * tile + step * kTileDepth * width, kTileDepth * width, tile}; }
};

// `count` of at most `Most` numbers, zeros after them.
template <int64_t Most>
inline void copy_padded(const bf16* from, int64_t count, void* to) {
    if (count == Most) {
        std::memcpy(to, from, Most * sizeof(bf16));
    } else {
        std::memset(to, 0, Most * sizeof(bf16));
        if (count > 0) std::memcpy(to, from, size_t(count) * sizeof(bf16));
    }
}

// One step of a tile of tokens, `there` of them and `depths` deep, where a token's numbers are neighbours.
inline void pack_rows(const bf16* b, int64_t b_col, int64_t there, int64_t depths, int width, bool pairs, bf16* to) {
    const auto copy = [&](int64_t t, void* row) { copy_padded<kTileDepth>(b + std::min(t, there) * b_col, t < there ? depths : 0, row); };
    if (!pairs) {
        for (int64_t t = 0; t < kTileSide; ++t) copy(t, to + t * kTileDepth);
        return;
    }
    alignas(64) float from[kTileSide * 16], transposed[kTileSide * 16];  // two numbers each
    for (int64_t t = 0; t < kTileSide; ++t) copy(t, from + t * 16);
    for (int i = 0; i < 16; i += kLanes) {
        for (int j = 0; j < width; j += kLanes) transpose(from + j * 16 + i, 16, transposed + i * 16 + j, 16);
    }
    for (int pair = 0; pair < 16; ++pair) {
        std::memcpy(static_cast<void*>(to + pair * 2 * width), transposed + pair * 16, size_t(width) * sizeof(float));
    }
}

// The same where numbers of one depth are neighbours.
inline void pack_columns(const bf16* b, int64_t b_row, int64_t there, int64_t depths, int width, bool pairs, bf16* to) {
    for (int64_t k = 0; k < kTileDepth; k += 2) {
        uint16_t first[kTileSide], second[kTileSide];
        uint32_t both[kTileSide];
        copy_padded<kTileSide>(b + std::min(k, depths) * b_row, k < depths ? there : 0, first);
        copy_padded<kTileSide>(b + std::min(k + 1, depths) * b_row, k + 1 < depths ? there : 0, second);
        for (int64_t t = 0; t < kTileSide; ++t) both[t] = first[t] | uint32_t(second[t]) << 16;
        if (pairs) {
            std::memcpy(static_cast<void*>(to + k * width), both, size_t(width) * sizeof(uint32_t));
        } else {
            for (int64_t t = 0; t < kTileSide; ++t) std::memcpy(static_cast<void*>(to + t * kTileDepth + k), both + t, sizeof(uint32_t));
        }
    }
}

// Tokens [first, first + tokens) of B, in memory of the calling thread.
inline PackedBf16 pack(const Bf16Gemm& gemm, int64_t first, int64_t tokens, bool pairs, int threads) {
    static thread_local Scratch room;
    PackedBf16 packed;
    packed.width = pairs ? int(std::min(tokens, kTileSide)) : int(kTileSide);
    packed.tiles = ceil_div(tokens, kTileSide);
    packed.steps = ceil_div(gemm.depth, kTileDepth);
    packed.tile = packed.steps * kTileDepth * packed.width;
    bf16* to = room.at_least<bf16>(packed.tiles * packed.tile);
    packed.at = to;
    constexpr int64_t kSteps = 16;  // at a time
    const int64_t pieces = ceil_div(packed.steps, kSteps);
    parallel_for(packed.tiles * pieces, packed.tiles * packed.tile < kChunk ? 1 : threads, [&](int64_t i) {
        const int64_t tile = i / pieces, token = tile * kTileSide, there = std::min(kTileSide, tokens - token);
        for (int64_t step = i % pieces * kSteps; step < std::min((i % pieces + 1) * kSteps, packed.steps); ++step) {
            const int64_t k = step * kTileDepth, depths = std::min(kTileDepth, gemm.depth - k);
            const bf16* b = gemm.b + (first + token) * gemm.b_col + k * gemm.b_row;
            bf16* at = to + tile * packed.tile + k * packed.width;
            if (gemm.b_row == 1) pack_rows(b, gemm.b_col, there, depths, packed.width, pairs, at);
            else pack_columns(b, gemm.b_row, there, depths, packed.width, pairs, at);
        }
    });
    return packed;
}

// low[0..15] and high[0..15], rounded: the first `count` numbers of them.
inline void write_line(const float* low, const float* high, int64_t count, bf16* to, bool streamed) {
#if defined(__AVX512BF16__)
    const __m512i line = __m512i(_mm512_cvtne2ps_pbh(count > 16 ? _mm512_load_ps(high) : _mm512_setzero_ps(), _mm512_load_ps(low)));
    if (count < kLine) _mm512_mask_storeu_epi16(to, __mmask32(low_bits(count)), line);
    else if (streamed && reinterpret_cast<uintptr_t>(to) % 64 == 0) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
    else _mm512_storeu_si512(to, line);
#else
    (void)streamed;
    from_floats(low, std::min<int64_t>(count, 16), to);
    if (count > 16) from_floats(high, count - 16, to + 16);
#endif
}

// The same, not rounded.
inline void write_line(const float* low, const float* high, int64_t count, float* to, bool streamed) {
    for (int64_t half = 0; half < 2 && count > 16 * half; ++half, to += 16) {
        const float* from = half ? high : low;
#if defined(__AVX512BF16__)
        if (streamed && count >= 16 * (half + 1) && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
            _mm512_stream_ps(to, _mm512_load_ps(from));
            continue;
        }
#else
        (void)streamed;
#endif
        std::memcpy(to, from, size_t(std::min<int64_t>(count - 16 * half, 16)) * sizeof(float));
    }
}

// A block of sums, `rows` x `columns` of it, to `to`; one of the strides is 1. A bias belongs to the rows, whose
// stride is 1 then.
template <class Out>
void deliver(const float* sums, int64_t rows, int64_t columns, Out* to, int64_t row_stride, int64_t column_stride, const bf16* bias,
             bool streamed) {
    alignas(64) float transposed[kBlockSums];
    if (bias || column_stride != 1) {
        for (int64_t i = 0; i * kTileSide < rows; ++i) {
            for (int64_t j = 0; j * kTileSide < columns; ++j) {
                const float* from = sums + (2 * i + j) * kTileSums;
                float* tile = transposed + (2 * j + i) * kTileSums;
                for (int a = 0; a < 16; a += kLanes) {
                    for (int b = 0; b < 16; b += kLanes) transpose(from + a * 16 + b, 16, tile + b * 16 + a, 16);
                }
            }
        }
        sums = transposed;
        std::swap(rows, columns);
        row_stride = column_stride;
    }
    alignas(64) float added[kLine] = {};
    if (bias) to_floats(bias, columns, added);
    for (int64_t row = 0; row < rows; ++row) {
        const float* low = sums + row / kTileSide * 2 * kTileSums + row % kTileSide * 16;
        const float* high = low + kTileSums;
        alignas(64) float line[kLine];
        if (bias) {
            for (int i = 0; i < 16; ++i) line[i] = low[i] + added[i];
            for (int i = 0; i < 16 && columns > 16; ++i) line[16 + i] = high[i] + added[16 + i];
            low = line;
            high = line + 16;
        }
        write_line(low, high, columns, to + row * row_stride, streamed);
    }
}

}  // namespace
}  // namespace nm
