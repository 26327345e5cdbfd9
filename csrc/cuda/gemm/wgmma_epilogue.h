// Sums of a wgmma tile to results, in parts of 64 rows and up to 64 columns. What is only rounded, with or without a bias, is written
// to shared memory by stmatrix, transposed where D is stored so, and copied out as a box, which leaves off what lies outside. With an
// activation or a residual, and where sums are parts of k, they go through shared memory in fp32, and on as those of mma.sp do.
//
// The loop over parts is one that runs: only the few instructions that name registers of sums are there for every part.
#pragma once

#include "../ptx_hopper.h"
#include "epilogue.h"
#include "wgmma_tile.h"

namespace nm::cuda::gemm {

template <class T, class Tile, bool kByColumn>
class Results {
  public:
    // `staging`: Tile::kStaging bytes for each warpgroup.
    NM_DEVICE explicit Results(uint8_t* staging) : staging_(staging) {}

    NM_DEVICE void store(const Gemm<T>& f, const CUtensorMap& map, const Origin& at, const float (&sums)[Tile::kDown][Tile::kSums]) {
        const bool rounded = !f.sums.parts && (kByColumn || (f.sums.activation == kNone && !f.sums.residual));
        uint32_t thread = threadIdx.x;
        pin(thread);  // what comes of it is not kept over the main loop
        const uint32_t group = thread / 128;
        NM_ONE_BY_ONE
        for (uint32_t part = 0; part < Tile::kParts; ++part) {
            const int64_t row = at.row + (group * Tile::kDown + part / Tile::kAcross) * 64, col = at.col + part % Tile::kAcross * Tile::kPartCols;
            if (rounded) {
                store_rounded(f, map, row, col, part, sums, thread);
            } else {
                store_summed(f, row, col, at.part, part, sums, thread);
            }
        }
    }

    // Shared memory has been read.
    NM_DEVICE void finish() const {
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }

  private:
    static constexpr int kCols = Tile::kPartCols;

    static NM_DEVICE void meet(uint32_t thread) { named_barrier<128>(1 + thread / 128); }

    // f(the sums of a part), as registers that the compiler can name.
    template <class F>
    static NM_DEVICE void with_part(uint32_t part, const float (&sums)[Tile::kDown][Tile::kSums], const F& f) {
        NM_UNROLL
        for (uint32_t p = 0; p < Tile::kParts; ++p) {
            if (p == part) f(sums[p / Tile::kAcross] + p % Tile::kAcross * (kCols / 2));
        }
    }

    NM_DEVICE void store_rounded(const Gemm<T>& f, const CUtensorMap& map, int64_t row, int64_t col, uint32_t part,
                                 const float (&sums)[Tile::kDown][Tile::kSums], uint32_t thread) {
        const uint32_t lane = thread % 32, warp = thread / 32 % 4, matrix = lane / 8, i = lane % 8;
        const bool first = thread % 128 == 0;
        if (first) bulk_wait_read<1>();  // the part that was stored two parts ago has been read
        meet(thread);
        float bias[2] = {0.0f, 0.0f};
        if (!kByColumn && f.sums.bias && row < f.m) {
            bias[0] = to_float(f.sums.bias[row + warp * 16 + lane / 4]);
            bias[1] = to_float(f.sums.bias[row + warp * 16 + lane / 4 + 8]);
        }
        // the lane's address in the first four matrices: 16 rows of the warp, 16 columns. Rows of what is staged have 128 bytes
        const uint32_t buffer = shared_address(staging_) + thread / 128 * Tile::kStaging + turn_ * Tile::kRounded;
        const uint32_t to = kByColumn ? buffer + at_128<128>(int(warp * 16 + matrix % 2 * 8 + i), int(matrix / 2))
                                      : buffer + at_128<128>(int(matrix / 2 * 8 + i), int(warp * 2 + matrix % 2));
        with_part(part, sums, [&](const float* d) {
            NM_UNROLL
            for (int j = 0; j < kCols / 16; ++j) {
                uint32_t pairs[4];
                NM_UNROLL
                for (int p = 0; p < 4; ++p) pairs[p] = rounded_pair<T>(d[8 * j + 2 * p] + bias[p % 2], d[8 * j + 2 * p + 1] + bias[p % 2]);
                stmatrix<!kByColumn>(kByColumn ? to ^ uint32_t(j << 5) : to + j * 2048, pairs);
            }
        });
        fence_proxy_async();
        meet(thread);
        if (first) {
            tma_store(map, int(kByColumn ? col : row), int(kByColumn ? row : col), buffer);
            bulk_commit();
        }
        turn_ ^= 1;
    }

    // The place of a sum of the part, in floats: rows of 64 of what lies beside each other in the result. 8 stay together; threads of
    // a warp that write find theirs in different banks.
    static NM_DEVICE uint32_t staged(uint32_t row, uint32_t col) {
        return kByColumn ? row * 64 + (col ^ 8 * (row & 3)) : col * 64 + (row ^ 8 * (col >> 1 & 3));
    }

    NM_DEVICE void store_summed(const Gemm<T>& f, int64_t row_0, int64_t col_0, int of_k, uint32_t part,
                                const float (&sums)[Tile::kDown][Tile::kSums], uint32_t thread) const {
        float* const own = reinterpret_cast<float*>(staging_ + thread / 128 * Tile::kStaging);
        meet(thread);  // the part before has been read
        const uint32_t first = staged(thread / 32 % 4 * 16 + thread % 32 / 4, thread % 4 * 2);
        with_part(part, sums, [&](const float* d) {
            NM_UNROLL
            for (int i = 0; i < kCols / 2; ++i) {
                const int j = i / 4, r = i / 2 % 2, e = i % 2;  // 8 j columns further, 8 r rows, e columns
                own[kByColumn ? (first ^ uint32_t(8 * j)) + 512 * r + e : (first ^ uint32_t(8 * r)) + 512 * j + 64 * e] = d[i];
            }
        });
        meet(thread);
        NM_ONE_BY_ONE
        for (uint32_t piece = thread % 128; piece < 64 * kCols / 8; piece += 128) {
            const uint32_t row = kByColumn ? piece / 8 : piece % 8 * 8, col = kByColumn ? piece % 8 * 8 : piece / 8;
            if (row_0 + row >= f.m || col_0 + col >= f.n) continue;
            const int64_t at = kByColumn ? (row_0 + row) * f.n + col_0 + col : (col_0 + col) * f.m + row_0 + row;
            Eight residual;
            if (!kByColumn && f.sums.residual && !f.sums.parts) residual.load(f.sums.residual + at);
            float eight[8];
            load_wide<8>(own + staged(row, col), eight);
            store_eight<T, kByColumn>(f, eight, residual, at, kByColumn ? col_0 + col : row_0 + row, of_k);
        }
    }

    uint8_t* staging_;
    uint32_t turn_ = 0;
};

}  // namespace nm::cuda::gemm
