// Copies slabs of k from global to shared memory ahead of the tensor cores. Each thread copies the same 16-byte pieces of every
// slab; pieces outside an operand become zeros. Since zero is not valid metadata, rows below the last get the metadata of the last.
//
// Not detected by the emulator: Each call of start() commits one group, even if nothing is left to copy, so that the n-th last
// group is always that of the n-th last slab. A thread's wait makes its own copies visible to itself; the barrier after it makes
// all copies visible to all threads. A slab replaces one that all threads have read: their reads precede a barrier that the copying
// thread has passed.
#pragma once

#include "../ptx.h"
#include "gemm.h"
#include "tile.h"

namespace nm::cuda::gemm {

template <class T, class Tile, bool kByColumn>
class Stages {
  public:
    NM_DEVICE Stages(const Gemm<T>& f, const Origin& at, uint8_t* shared) : shared_(shared), slab_(at.first), end_(at.last) {
        const int thread = int(threadIdx.x);
        const int64_t slab = at.first, slabs = f.k / kDepth;

        const int row = thread / 4, piece = thread % 4;
        to_values_ = Tile::kDense + at_64(row, piece);
        values_ = reinterpret_cast<const uint8_t*>(f.values) + (at.row + row) * f.k + slab * kDepth + piece * 16;
        values_step_ = kValueRows * f.k;
        rows_ = clamp(f.m - at.row - row);

        const int64_t own = at.row / 16 + thread / 8, last = f.m / 16 - 1, tile = own < last ? own : last;
        to_metadata_ = Tile::kDense + Tile::kValues + thread * 16;
        metadata_ = reinterpret_cast<const uint8_t*>(f.metadata) + ((tile / f.warps * slabs + slab) * f.warps + tile % f.warps) * 128 + thread % 8 * 16;
        metadata_slab_ = f.warps * 128;

        const uint8_t* dense = reinterpret_cast<const uint8_t*>(f.dense);
        if constexpr (kByColumn) {
            const int depth = thread / kAcross, column = thread % kAcross;
            to_dense_ = at_128<2 * Tile::kCols>(depth, column);
            dense_ = dense + ((slab * kDepth + depth) * f.n + at.col + column * 8) * 2;
            dense_step_ = kDenseRows * f.n * 2;
            dense_slab_ = kDepth * f.n * 2;
            cols_ = at.col + column * 8 < f.n ? kDepth : 0;
        } else {
            const int col = thread / kAcross, depth = thread % kAcross;
            to_dense_ = at_128<2 * kDepth>(col, depth);
            dense_ = dense + ((at.col + col) * f.k + slab * kDepth + depth * 8) * 2;
            dense_step_ = kDenseRows * f.k * 2;
            dense_slab_ = kDepth * 2;
            cols_ = clamp(f.n - at.col - col);
        }
    }

    // Starts copying the next slab, if any, into its stage.
    NM_DEVICE void start() {
        if (slab_ < end_) {
            uint8_t* const stage = shared_ + into_;
            NM_UNROLL
            for (int i = 0; i < Tile::kRows / kValueRows; ++i) {
                const bool there = i * kValueRows < rows_;  // half a line; the next slab is the other half
                cp_async<16, false, true>(stage + to_values_ + i * (kValueRows * 64), values_ + i * values_step_, there ? 16 : 0);
            }
            NM_UNROLL
            for (int i = 0; i < Tile::kDense / (16 * Tile::kThreads); ++i) {
                // along k nothing ends inside a slab
                const bool there = kByColumn ? cols_ > 0 : i * kDenseRows < cols_;
                cp_async<16>(stage + to_dense_ + i * (16 * Tile::kThreads), dense_ + i * dense_step_, there ? 16 : 0);
            }
            if (int(threadIdx.x) < Tile::kMetadata / 16) cp_async<16>(stage + to_metadata_, metadata_);
            values_ += kDepth;
            metadata_ += metadata_slab_;
            dense_ += dense_slab_;
            into_ = into_ == (Tile::kStages - 1) * Tile::kStage ? 0 : into_ + Tile::kStage;
            ++slab_;
        }
        cp_async_commit();
    }

  private:
    static constexpr int kValueRows = Tile::kThreads / 4;  // rows of values that all threads copy at once
    static constexpr int kAcross = (kByColumn ? Tile::kCols : kDepth) / 8;  // pieces of a row of the dense tile
    static constexpr int kDenseRows = Tile::kThreads / kAcross;
    // so that a thread's pieces have the same place in their rows, all inside
    static_assert(kValueRows % 8 == 0 && kDenseRows % 8 == 0 && Tile::kRows % kValueRows == 0);
    static_assert(Tile::kDense % (16 * Tile::kThreads) == 0 && Tile::kMetadata / 16 <= Tile::kThreads);

    static NM_DEVICE int clamp(int64_t left) { return int(left < 0 ? 0 : left < Tile::kRows + Tile::kCols ? left : Tile::kRows + Tile::kCols); }

    uint8_t* shared_;
    const uint8_t *values_, *metadata_, *dense_;
    int64_t values_step_, dense_step_, dense_slab_;
    uint32_t to_values_, to_metadata_, to_dense_;
    uint32_t into_ = 0;
    int rows_, cols_;  // remaining, from the thread's first on
    int slab_, end_, metadata_slab_;
};

}  // namespace nm::cuda::gemm
