// Loads operands of a warp from shared memory to registers. A warp multiplies a slab in four turns: the first and second 32 of k,
// and for each the first and second half of the columns. During one turn the operands of the next are loaded: B always, A when a
// new 32 of k begins, metadata, one word for both, when a new slab begins.
#pragma once

#include "../memory.h"
#include "../ptx.h"
#include "tile.h"

namespace nm::cuda::gemm {

template <class T, class Tile, bool kByColumn>
class Fragments {
  public:
    static constexpr int kDown = Tile::kDown, kHalf = Tile::kAcross / 2;

    NM_DEVICE Fragments() {
        const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
        const int row = warp / Tile::kWarpsAcross * Tile::kWarpRows, col = warp % Tile::kWarpsAcross * Tile::kWarpCols;
        // the rows that the lane names to ldmatrix: of A by 8 rows, then by 8 values; of B by 8 of k
        values_ = Tile::kDense + at_64(row + lane % 16, lane / 16);
        metadata_ = uint32_t(Tile::kDense + Tile::kValues + row * 8 + lane * 4);
        dense_ = kByColumn ? at_128<2 * Tile::kCols>(lane, col / 8) : at_128<2 * kDepth>(col + lane % 8, lane / 8);
    }

    // Turn 0 of the slab in a stage; before it, the slab's metadata is that of the next one.
    NM_DEVICE void load_first(const uint8_t* stage) {
        NM_UNROLL
        for (int i = 0; i < kDown; ++i) next_[i] = load_word<4>(stage + metadata_ + i * 128);
        load_values<0>(stage);
        load_dense<0, 0>(stage);
    }

    NM_DEVICE void begin_slab() {
        NM_UNROLL
        for (int i = 0; i < kDown; ++i) word_[i] = next_[i];
    }

    // Turn `Turn` of the slab, 1 to 3.
    template <int Turn>
    NM_DEVICE void load(const uint8_t* stage) {
        if constexpr (Turn == 2) load_values<1>(stage);
        load_dense<Turn / 2, Turn % 2>(stage);
    }

    template <int Turn>
    NM_DEVICE void multiply(float (&sums)[kDown][Tile::kAcross][4]) const {
        constexpr int step = Turn / 2, half = Turn % 2;
        NM_UNROLL
        for (int j = 0; j < kHalf; ++j) {
            NM_UNROLL
            for (int i = 0; i < kDown; ++i) mma_sp_m16n8k32<T, step>(sums[i][half * kHalf + j], a_[step][i], b_[half][j], word_[i]);
        }
    }

  private:
    template <int Step>
    NM_DEVICE void load_values(const uint8_t* stage) {
        NM_UNROLL
        for (int i = 0; i < kDown; ++i) ldmatrix(a_[Step][i], stage + ((values_ ^ (Step * 32)) + i * (16 * 64)));
    }

    template <int Step, int Half>
    NM_DEVICE void load_dense(const uint8_t* stage) {
        NM_UNROLL
        for (int j = 0; j < kHalf; ++j) {
            const int col = Half * kHalf + j;
            if constexpr (kByColumn) {
                ldmatrix_trans(b_[Half][j], stage + ((dense_ ^ uint32_t(col << 4)) + Step * (32 * 2 * Tile::kCols)));
            } else {
                ldmatrix(b_[Half][j], stage + ((dense_ ^ (Step * 64)) + col * (8 * 2 * kDepth)));
            }
        }
    }

    // by column, a warp's columns are whole 128-byte units, within which the low bits of an offset can be changed
    static_assert(!kByColumn || Tile::kWarpCols == 64);

    uint32_t values_, metadata_, dense_;  // byte offsets from the beginning of a stage
    uint32_t a_[2][kDown][4], b_[2][kHalf][4];
    uint32_t word_[kDown], next_[kDown];
};

}  // namespace nm::cuda::gemm
