// Rows of stored integers times digits of x, tokens in lanes: 32 rows at a time, of which 512 columns are expanded, and four columns of a
// row are broadcast.
#pragma once

#include "digits_avx512.h"

#if defined(NM_DIGITS)

namespace nm {
namespace {

constexpr int64_t kTileBytes = 1024, kBlockRows = 32;

// Digits as the right operand's tiles: of each 64 columns `count` tiles, 16 times the digits of four columns for 16 columns of the
// product, which are the tokens' upper and lower digits, or those of tokens in the first tile and the lower ones in the second.
struct DigitTiles {
    const uint8_t* tiles;
    int count;
};

inline DigitTiles tiles_of(const Digits& x, int64_t tokens, uint8_t* to, int threads) {
    const DigitTiles made{to, tokens > kMostTokens / 2 ? 2 : 1};
    const int64_t steps = x.width / 64;
    parallel_for((steps + 15) / 16, threads, [&](int64_t range) {
        for (int64_t step = range * 16; step < std::min(steps, (range + 1) * 16); ++step) {
            for (int tile = 0; tile < made.count; ++tile) {
                Uints rows[16];
                for (int i = 0; i < 16; ++i) {
                    const int64_t t = made.count == 2 ? i : i % 8;
                    const bool low = made.count == 2 ? tile == 1 : i >= 8;
                    rows[i] = t < tokens ? load_as<Uints>((low ? x.lower(t) : x.upper(t)) + step * 64) : Uints{};
                }
                transpose(rows);
                for (int i = 0; i < 16; ++i) store_as(to + (step * made.count + tile) * kTileBytes + i * 64, rows[i]);
            }
        }
    });
    return made;
}

// Both digits' totals [kBlockRows][Tiles][16], transposed, combined and scaled: sums[t * kBlockRows + r].
template <int Tiles>
void transpose_sums(const float* totals, const Digits& x, int64_t tokens, float* sums) {
    for (int i = 0; i < Tiles; ++i) {
        for (int half = 0; half < 2; ++half) {
            transpose(totals + half * 16 * Tiles * 16 + i * 16, Tiles * 16, sums + i * 16 * kBlockRows + half * 16, kBlockRows);
        }
    }
    for (int64_t t = 0; t < tokens; ++t) {
        float *upper = sums + t * kBlockRows, *lower = sums + (t + Tiles * 8) * kBlockRows;
        for (int r = 0; r < kBlockRows; r += kLanes) store(upper + r, fused(load(upper + r), splat(256.0f), load(lower + r)) * x.scale[t]);
    }
}

// Adds the products of eight rows with `columns` columns of digits; the rows' bytes are kLaneColumns apart.
constexpr int64_t kLaneColumns = 512, kLaneRows = 8;

template <int Tiles>
void add_lanes(const uint8_t* lines, const uint8_t* digits, int64_t columns, int32_t* products) {
    Register sums[kLaneRows][Tiles];
    for (int r = 0; r < kLaneRows; ++r) {
        for (int i = 0; i < Tiles; ++i) sums[r][i] = _mm512_load_si512(products + (r * Tiles + i) * 16);
    }
    for (int64_t step = 0; step < columns / 64; ++step) {
        for (int k = 0; k < 16; ++k) {
            Register x[Tiles];
            for (int i = 0; i < Tiles; ++i) x[i] = _mm512_load_si512(digits + (step * Tiles + i) * kTileBytes + k * 64);
            for (int r = 0; r < kLaneRows; ++r) {
                const Register four = _mm512_set1_epi32(load_as<int32_t>(lines + r * kLaneColumns + step * 64 + k * 4));
                for (int i = 0; i < Tiles; ++i) sums[r][i] = _mm512_dpbusd_epi32(sums[r][i], four, x[i]);
            }
        }
    }
    for (int r = 0; r < kLaneRows; ++r) {
        for (int i = 0; i < Tiles; ++i) _mm512_store_si512(products + (r * Tiles + i) * 16, sums[r][i]);
    }
}

// The sums of rows [begin, end) for `tokens` tokens, to put(first row, rows, sums), sums[t * kBlockRows + r]. False: indices do not
// ascend, or are not below M.
template <int N, int M, int Bits, int Tiles, class Put>
bool by_lanes(const Integers& w, const uint8_t* indices, const Digits& x, const DigitTiles& digits, int64_t tokens, int64_t begin, int64_t end,
              const Put& put) {
    using Pieces = Expander<N, M, Bits>;
    static_assert(Pieces::kColumns == kLaneColumns, "a piece of a row");
    constexpr int64_t kLane = Tiles * 16;
    static thread_local Scratch room;
    Pieces pieces{w, indices};
    const int64_t count = pieces.pieces(), width = count * kLaneColumns, step_row = w.steps + kLanes;
    const int64_t columns = w.steps == 1 ? width : w.kept / w.steps * M / N;
    float* const wide = room.at_least<float>(kBlockRows * (step_row + 3 * kLane + kLaneColumns / 4) + w.steps * kLane);
    float* const totals = wide + kBlockRows * step_row;
    float* const transposed = totals + kBlockRows * kLane;
    int32_t* const products = reinterpret_cast<int32_t*>(transposed + kBlockRows * kLane);
    uint8_t* const lines = reinterpret_cast<uint8_t*>(products + kBlockRows * kLane);
    int32_t* const offsets = reinterpret_cast<int32_t*>(lines + kBlockRows * kLaneColumns);
    // integers have 128 added, so that they are unsigned: sums begin with what this takes off again
    for (int64_t s = 0; s < w.steps; ++s) {
        for (int i = 0; i < Tiles; ++i) {
            Register sum = _mm512_setzero_si512();
            for (int64_t step = s * columns / 64; step < (s + 1) * columns / 64; ++step) {
                const uint8_t* tile = digits.tiles + (step * Tiles + i) * kTileBytes;
                for (int k = 0; k < 16; ++k) sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(char(128)), _mm512_load_si512(tile + k * 64));
            }
            _mm512_store_si512(offsets + (s * Tiles + i) * 16, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
        }
    }
    for (int64_t row = begin; row < end; row += kBlockRows) {
        const int64_t rows = std::min(kBlockRows, end - row);
        for (int64_t r = 0; r < rows; ++r) wide_steps(w, row + r, wide + r * step_row);
        std::memset(totals, 0, size_t(kBlockRows * kLane) * sizeof(float));
        int64_t segment = 0, until = columns;
        for (int64_t r = 0; r < kBlockRows; ++r) std::memcpy(products + r * kLane, offsets, kLane * sizeof(int32_t));
        for (int64_t piece = 0; piece < count; ++piece) {
            for (int64_t r = 0; r < rows; ++r) {
                pieces.template prefetch<_MM_HINT_T1>(row + r + kBlockRows, piece);
                pieces.expand(row + r, piece, [&](int i, Register line) __attribute__((always_inline)) {
                    _mm512_store_si512(lines + r * kLaneColumns + i * 64, _mm512_xor_si512(line, _mm512_set1_epi8(char(128))));
                });
            }
            for (int64_t first = piece * kLaneColumns; first < (piece + 1) * kLaneColumns;) {
                const int64_t last = std::min(until, (piece + 1) * kLaneColumns);
                for (int64_t r = 0; r < rows; r += kLaneRows) {
                    const uint8_t* some = lines + r * kLaneColumns + first % kLaneColumns;
                    add_lanes<Tiles>(some, digits.tiles + first / 64 * Tiles * kTileBytes, last - first, products + r * kLane);
                }
                first = last;
                if (last != until) break;
                const int32_t* next = offsets + (segment + 1 < w.steps ? segment + 1 : 0) * kLane;
                for (int64_t r = 0; r < rows; ++r) {
                    const Floats step = splat(wide[r * step_row + segment]);
                    for (int i = 0; i < Tiles; ++i) {
                        float* total = totals + r * kLane + i * 16;
                        const Register sum = _mm512_load_si512(products + r * kLane + i * 16);
                        store(total, fused(Floats(_mm512_cvtepi32_ps(sum)), step, load(total)));
                    }
                    std::memcpy(products + r * kLane, next, kLane * sizeof(int32_t));
                }
                ++segment;
                until += columns;
                if (segment == w.steps) break;  // past it there are zeros alone
            }
        }
        transpose_sums<Tiles>(totals, x, tokens, transposed);
        put(row, rows, transposed);
    }
    return pieces.valid();
}

}  // namespace
}  // namespace nm

#endif
