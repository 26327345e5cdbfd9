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

enum class Streamed { kNeither, kLeft, kRight };  // the side that takes no place in the first-level cache from the other one

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

// A tile of sums is sixteen registers; a row of the right side is loaded once for all of them, pairs of the left are broadcast.
class BlockProduct {
  public:
    BlockProduct(int width, Streamed) : width_(width), lanes_(__mmask16((1u << width) - 1)) {}

    template <int Left, int Right, class Between>
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
    BlockProduct(int width, Streamed streamed) : row_(4 * width), streamed_(streamed), tiles_(width) {}

    // `Left` and `Right` are how many tiles there are on each side, 1 or 2. The sums are added to, or set if `fresh`; between() is
    // called once in every step.
    template <int Left, int Right, class Between>
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
            load<4>(left.tile, 64, streamed_ == Streamed::kLeft);
            load<6>(right.tile, row_, streamed_ == Streamed::kRight);
            tiles_.dot<0, 4, 6>();
            if (Left == 2) {
                load<5>(left.tile + left.second, 64, streamed_ == Streamed::kLeft);
                tiles_.dot<2, 5, 6>();
            }
            if (Right == 2) {
                load<7>(right.tile + right.second, row_, streamed_ == Streamed::kRight);
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

    template <int I>
    void load(const void* from, int64_t stride, bool streamed) {
        if (streamed) tiles_.stream_load<I>(from, stride);
        else tiles_.load<I>(from, stride);
    }

    int64_t row_;
    Streamed streamed_;
    TileRegisters tiles_;
};

#endif

}  // namespace
}  // namespace nm
