// sums += left times right, for 32 x 32 results at a time: on tile registers (amx.h), or with vdpbf16ps where there is
// AVX512-BF16 and no AMX.
#pragma once

#include "amx.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace nm {
namespace {

constexpr int64_t kTileSide = 16;                // rows of a tile of sums, and the most columns
constexpr int64_t kTileDepth = 32;               // products summed in one step
constexpr int64_t kTileSums = 16 * 16;           // fp32 numbers of a tile of sums, its rows 64 bytes apart
constexpr int64_t kBlockSums = 4 * kTileSums;    // tile (i, j) of a block of 2 x 2 is the 2i + j-th

// Two tiles of one side, and the same for the steps that follow, in elements.
struct Side {
    const bf16* tile;
    int64_t step, second;
};

enum class Streamed { kLeft, kRight };  // the side that is read once; the other one stays in the first-level cache

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

// A tile of sums is sixteen registers; a row of the right side is loaded once for all of them, pairs of the left are broadcast.
class BlockProduct {
  public:
    explicit BlockProduct(int width) : width_(width), lanes_(__mmask16((1u << width) - 1)) {}

    template <int Left, int Right, Streamed, class Between>
    void add(Side left, Side right, int64_t steps, float* sums, bool fresh, const Between& between) const {
        for (int i = 0; i < Left; ++i) {
            for (int j = 0; j < Right; ++j) {
                float* to = sums + (2 * i + j) * kTileSums;
                __m512 sum[16];
#pragma GCC unroll 16
                for (int row = 0; row < 16; ++row) sum[row] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(to + row * 16);
                for (int64_t step = 0; step < steps; ++step) {
                    const char* a = reinterpret_cast<const char*>(left.tile + i * left.second + step * left.step);
                    const char* b = reinterpret_cast<const char*>(right.tile + j * right.second + step * right.step);
                    for (int pair = 0; pair < 16; ++pair, a += 4, b += 4 * width_) {
                        const __m512bh inputs = __m512bh(_mm512_maskz_loadu_epi32(lanes_, b));
#pragma GCC unroll 16
                        for (int row = 0; row < 16; ++row) {
                            int32_t two;
                            std::memcpy(&two, a + 64 * row, 4);
                            sum[row] = _mm512_dpbf16_ps(sum[row], __m512bh(_mm512_set1_epi32(two)), inputs);
                        }
                    }
                    if (i == 0 && j == 0) between();
                }
#pragma GCC unroll 16
                for (int row = 0; row < 16; ++row) _mm512_store_ps(to + row * 16, sum[row]);
            }
        }
    }

  private:
    int width_;
    __mmask16 lanes_;
};

#else

class BlockProduct {
  public:
    explicit BlockProduct(int width) : row_(4 * width), tiles_(width) {}

    // `Left` and `Right` are how many tiles there are on each side, 1 or 2; `between()` is called once for every step. Sums are added to unless
    // `fresh`.
    template <int Left, int Right, Streamed Once, class Between>
    void add(Side left, Side right, int64_t steps, float* sums, bool fresh, const Between& between) {
        if (fresh) {
            tiles_.zero<0>();
            if (Right == 2) tiles_.zero<1>();
            if (Left == 2) tiles_.zero<2>();
            if (Left == 2 && Right == 2) tiles_.zero<3>();
        } else {
            tiles_.load<0>(sums, kSumsRow);
            if (Right == 2) tiles_.load<1>(sums + kTileSums, kSumsRow);
            if (Left == 2) tiles_.load<2>(sums + 2 * kTileSums, kSumsRow);
            if (Left == 2 && Right == 2) tiles_.load<3>(sums + 3 * kTileSums, kSumsRow);
        }
        for (int64_t step = 0; step < steps; ++step) {
            load<4, Once == Streamed::kLeft>(left.tile, 64);
            load<6, Once == Streamed::kRight>(right.tile, row_);
            tiles_.dot<0, 4, 6>();
            if (Left == 2) {
                load<5, Once == Streamed::kLeft>(left.tile + left.second, 64);
                tiles_.dot<2, 5, 6>();
            }
            if (Right == 2) {
                load<7, Once == Streamed::kRight>(right.tile + right.second, row_);
                tiles_.dot<1, 4, 7>();
                if (Left == 2) tiles_.dot<3, 5, 7>();
            }
            between();
            left.tile += left.step;
            right.tile += right.step;
        }
        tiles_.store<0>(sums, kSumsRow);
        if (Right == 2) tiles_.store<1>(sums + kTileSums, kSumsRow);
        if (Left == 2) tiles_.store<2>(sums + 2 * kTileSums, kSumsRow);
        if (Left == 2 && Right == 2) tiles_.store<3>(sums + 3 * kTileSums, kSumsRow);
    }

  private:
    static constexpr int64_t kSumsRow = 64;

    template <int I, bool Once>
    void load(const void* from, int64_t stride) {
        if (Once) tiles_.stream_load<I>(from, stride);
        else tiles_.load<I>(from, stride);
    }

    int64_t row_;
    Tiles tiles_;
};

#endif

}  // namespace
}  // namespace nm
