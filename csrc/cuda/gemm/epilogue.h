// From sums to results. Each warp writes its sums to shared memory, row by row of A, and reads eight at a time that are contiguous
// in the result, so that bias, activation and residual are one short piece of code. 16-bit results are stored by 16 bytes; four
// neighbouring threads store 64, and each thread's next eight sums follow.
#pragma once

#include "../memory.h"
#include "../ptx.h"
#include "gemm.h"
#include "tile.h"

namespace nm::cuda::gemm {

// Eight elements of 16 bits.
struct Eight {
    uint32_t words[4] = {};

    template <class T>
    NM_DEVICE void load(const T* from) {
        load_wide<4>(reinterpret_cast<const uint32_t*>(from), words);
    }
};

template <int kActivation>
NM_DEVICE void activate(float (&sums)[8]) {
    NM_UNROLL
    for (int i = 0; i < 8; ++i) sums[i] = activated(sums[i], kActivation);
}

// Eight sums from `at` on of the result [sums.tokens, sums.rows], which begin at `row` of a stored row.
template <class T, bool kPlain>
NM_DEVICE void store_eight(const Gemm<T>& f, float (&sums)[8], const Eight& residual, int64_t at, int64_t row, int part) {
    if (f.sums.parts) return store_global<8>(f.sums.parts + part * f.sums.tokens * f.sums.rows + at, sums);
    if (!kPlain && f.sums.bias) {
        Eight bias;
        bias.load(f.sums.bias + row);
        NM_UNROLL
        for (int i = 0; i < 8; ++i) sums[i] += element<T>(bias.words, i);
    }
    switch (kPlain ? int(kNone) : f.sums.activation) {
        case kGelu: activate<kGelu>(sums); break;
        case kSilu: activate<kSilu>(sums); break;
        case kRelu2: activate<kRelu2>(sums); break;
        default: break;
    }
    if (!kPlain && f.sums.residual) {
        NM_UNROLL
        for (int i = 0; i < 8; ++i) sums[i] += element<T>(residual.words, i);
    }
    uint32_t result[4];
    NM_UNROLL
    for (int i = 0; i < 4; ++i) result[i] = rounded_pair<T>(sums[2 * i], sums[2 * i + 1]);
    store_global<4>(reinterpret_cast<uint32_t*>(f.sums.y + at), result);
}

// The offset of a sum in the warp's memory, by row and column of D, in floats. 8 columns stay together; threads that write 2
// columns of rows g to g + 3, and threads that read rows 8 q + e of one column, use different banks.
template <class Tile>
NM_DEVICE int staged(int row, int col) {
    return row * Tile::kWarpCols + (col ^ 8 * ((row ^ row >> 3) & 3));
}

// Call after a barrier, when the stages are no longer read.
template <class T, class Tile, bool kByColumn>
NM_DEVICE void store_sums(const Gemm<T>& f, const Origin& origin, const float (&sums)[Tile::kDown][Tile::kAcross][4], uint8_t* shared) {
    constexpr int kRows = Tile::kWarpRows, kCols = Tile::kWarpCols, kPieces = kRows * kCols / 8 / 32;
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, g = lane / 4, t = lane % 4;
    float* const own = reinterpret_cast<float*>(shared) + warp * (kRows * kCols);
    NM_UNROLL
    for (int i = 0; i < Tile::kDown; ++i) {
        NM_UNROLL
        for (int j = 0; j < Tile::kAcross; ++j) {
            NM_UNROLL
            for (int half = 0; half < 2; ++half) store_wide<2>(own + staged<Tile>(i * 16 + half * 8 + g, j * 8 + 2 * t), &sums[i][j][2 * half]);
        }
    }
    __syncwarp();

    const int64_t row_0 = origin.row + warp / Tile::kWarpsAcross * kRows, col_0 = origin.col + warp % Tile::kWarpsAcross * kCols;
    constexpr int kTogether = 4;  // residuals in flight
    static_assert(kPieces % kTogether == 0);
    NM_ONE_BY_ONE
    for (int first = 0; first < kPieces; first += kTogether) {
        // the eight sums of a piece: row and column of the first in the warp's part of D
        const auto place = [&](int piece, int& row, int& col) {
            if constexpr (kByColumn) {
                row = (piece * 32 + lane) / (kCols / 8), col = (piece * 32 + lane) % (kCols / 8) * 8;
            } else {
                row = piece % (kRows / 32) * 32 + t * 8, col = piece / (kRows / 32) * 8 + g;
            }
        };
        const auto stored = [&](int row, int col) { return kByColumn ? (row_0 + row) * f.n + col_0 + col : (col_0 + col) * f.m + row_0 + row; };
        Eight residual[kTogether];
        NM_UNROLL
        for (int p = 0; p < kTogether; ++p) {
            int row, col;
            place(first + p, row, col);
            if (!kByColumn && f.sums.residual && !f.sums.parts && row_0 + row < f.m && col_0 + col < f.n) residual[p].load(f.sums.residual + stored(row, col));
        }
        NM_UNROLL
        for (int p = 0; p < kTogether; ++p) {
            int row, col;
            place(first + p, row, col);
            if (row_0 + row >= f.m || col_0 + col >= f.n) continue;
            float eight[8];
            if constexpr (kByColumn) {
                load_wide<8>(own + staged<Tile>(row, col), eight);
            } else {
                NM_UNROLL
                for (int i = 0; i < 8; ++i) eight[i] = own[staged<Tile>(row + i, col)];
            }
            store_eight<T, kByColumn>(f, eight, residual[p], stored(row, col), kByColumn ? col_0 + col : row_0 + row, origin.part);
        }
    }
}

}  // namespace nm::cuda::gemm
