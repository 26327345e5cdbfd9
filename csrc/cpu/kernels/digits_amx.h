// Rows of stored integers times digits of x, in the tiles of AMX: 32 rows at a time, whose next 512 columns are expanded between the
// products of these. With up to eight tokens both digits share a tile.
#pragma once

#include "digits_lanes.h"
#include "simd/amx.h"

#if defined(NM_DIGITS)

namespace nm {
namespace {

// As by_lanes.
template <int N, int M, int Bits, int Tiles, class Put>
bool by_tiles(const Integers& w, const uint8_t* indices, const Digits& x, const DigitTiles& digits, int64_t tokens, int64_t begin, int64_t end,
              const Put& put) {
    using Pieces = Expander<N, M, Bits>;
    static thread_local Scratch room;
    const int64_t step_row = w.steps + kLanes;
    float* const wide = room.at_least<float>(kBlockRows * (step_row + 3 * Tiles * 16) + 2 * kBlockRows * 512 / int64_t(sizeof(float)));
    float* const totals = wide + kBlockRows * step_row;                    // [32][Tiles][16]
    int32_t* const products = reinterpret_cast<int32_t*>(totals + kBlockRows * Tiles * 16);  // the same
    float* const transposed = reinterpret_cast<float*>(products + kBlockRows * Tiles * 16);      // [Tiles * 16][32]
    int8_t* const lines = reinterpret_cast<int8_t*>(transposed + kBlockRows * Tiles * 16);       // 2 [8][32][64]
    Pieces pieces{w, indices};
    const int64_t count = pieces.pieces(), units = (end - begin + kBlockRows - 1) / kBlockRows * count;
    const int64_t columns = w.steps == 1 ? INT64_MAX : w.kept / w.steps * M / N;
    TileRegisters tiles(16);
    // four rows of a unit, a block's rows and a piece of them
    const auto expand = [&](int64_t unit, int part) __attribute__((always_inline)) {
        if (unit >= units) return;
        const int64_t row = begin + unit / count * kBlockRows, piece = unit % count;
        int8_t* to = lines + unit % 2 * kBlockRows * 512;
        for (int r = part * 4; r < part * 4 + 4; ++r) {
            if (row + r < end) {
                pieces.template prefetch<_MM_HINT_T1>(row + r + kBlockRows, piece);
                pieces.expand(row + r, piece, [&](int i, Register line) __attribute__((always_inline)) {
                    _mm512_store_si512(to + i * kBlockRows * 64 + r * 64, line);
                });
            } else {
                for (int i = 0; i < 8; ++i) _mm512_store_si512(to + i * kBlockRows * 64 + r * 64, _mm512_setzero_si512());
            }
        }
    };
    const auto clear = [&]() __attribute__((always_inline)) {
        tiles.zero<0>();
        tiles.zero<1>();
        if (Tiles == 2) {
            tiles.zero<2>();
            tiles.zero<3>();
        }
    };
    for (int part = 0; part < 8; ++part) expand(0, part);
    for (int64_t unit = 0; unit < units;) {
        const int64_t row = begin + unit / count * kBlockRows, rows = std::min(kBlockRows, end - row);
        for (int64_t r = 0; r < rows; ++r) wide_steps(w, row + r, wide + r * step_row);
        std::memset(totals, 0, size_t(kBlockRows * Tiles * 16) * sizeof(float));
        clear();
        int64_t segment = 0, until = columns;
        const auto flush = [&]() __attribute__((always_inline)) {
            constexpr int64_t kStride = Tiles * 64;
            tiles.store<0>(products, kStride);
            tiles.store<1>(products + 16 * Tiles * 16, kStride);
            if (Tiles == 2) {
                tiles.store<2>(products + 16, kStride);
                tiles.store<3>(products + 16 * Tiles * 16 + 16, kStride);
            }
            clear();
            for (int64_t r = 0; r < rows; ++r) {
                const Floats step = splat(wide[r * step_row + segment]);
                for (int i = 0; i < Tiles; ++i) {
                    float* total = totals + (r * Tiles + i) * 16;
                    const Register sum = _mm512_load_si512(products + (r * Tiles + i) * 16);
                    store(total, fused(Floats(_mm512_cvtepi32_ps(sum)), step, load(total)));
                }
            }
        };
        for (int64_t piece = 0; piece < count; ++piece, ++unit) {
            const int8_t* left = lines + unit % 2 * kBlockRows * 512;
            for (int i = 0; i < 8; ++i) {
                const int64_t column = piece * 512 + i * 64;
                const uint8_t* right = digits.tiles + column / 64 * Tiles * kTileBytes;
                tiles.load<4>(left + i * kBlockRows * 64, 64);
                tiles.load<5>(left + i * kBlockRows * 64 + kTileBytes, 64);
                tiles.load<6>(right, 64);
                tiles.dot_bytes<0, 4, 6>();
                tiles.dot_bytes<1, 5, 6>();
                if (Tiles == 2) {
                    tiles.load<7>(right + kTileBytes, 64);
                    tiles.dot_bytes<2, 4, 7>();
                    tiles.dot_bytes<3, 5, 7>();
                }
                expand(unit + 1, i);
                if (column + 64 == until) {
                    flush();
                    ++segment;
                    until += columns;
                }
            }
        }
        if (w.steps == 1) flush();
        transpose_sums<Tiles>(totals, x, tokens, transposed);
        put(row, rows, transposed);
    }
    return pieces.valid();
}

}  // namespace
}  // namespace nm

#endif
