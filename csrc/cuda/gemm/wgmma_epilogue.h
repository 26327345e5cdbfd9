// From the sums of a wgmma tile to results, in parts of 64 rows and up to 64 columns. If only rounding and a bias are needed,
// stmatrix writes to shared memory, transposed if D is stored transposed, and a TMA copy clips what lies outside. With an
// activation or a residual, and for sums of parts of k, they go through shared memory in fp32 and continue as those of mma.sp.
//
// The loop over parts is not unrolled: only the few instructions that name registers of sums exist for every part.
#pragma once

#include "../ptx_hopper.h"
#include "epilogue.h"
#include "wgmma_tile.h"

namespace nm::cuda::gemm {

// The factors of a part's sums; none in 16 bits.
template <class T>
struct Steps {
    NM_DEVICE Steps(const Gemm<T>&, int64_t, int64_t, uint32_t) {}
    NM_DEVICE float operator()(float sum, int) const { return sum; }
};

// The steps of the two rows of a thread, and of its column for each sum.
template <class A, class B, bool kPromotes>
struct Steps<EightBits<A, B, kPromotes>> {
    const ScaledGemm& f;  // a kernel parameter, so reading it takes no register
    float of_row[2] = {};
    int col;  // sizes have 31 bits

    NM_DEVICE Steps(const ScaledGemm& told, int64_t row, int64_t first_col, uint32_t thread) : f(told), col(int(first_col) + int(thread % 4) * 2) {
        if (row >= f.m) return;
        row += thread / 32 % 4 * 16 + thread % 32 / 4;
        of_row[0] = f.row_steps[row * f.row_stride];
        of_row[1] = f.row_steps[(row + 8) * f.row_stride];
    }

    // Sum i of the part: 8 (i / 4) columns further, 8 (i / 2 % 2) rows, i % 2 columns.
    template <class Sum>
    NM_DEVICE float operator()(Sum sum, int i) const {
        const int own = col + 8 * (i / 4) + i % 2, last = int(f.n) - 1;
        return float(sum) * of_row[i / 2 % 2] * f.col_steps[(own < last ? own : last) * f.col_stride];
    }
};

template <class T, class Tile, bool kByColumn>
class Results {
    using Out = typename Kind<T>::Out;
    using Sum = typename Kind<T>::Sum;
    using Told = typename Kind<T>::Told;

  public:
    // `staging`: Tile::kStaging bytes for each warpgroup.
    NM_DEVICE explicit Results(uint8_t* staging) : staging_(staging) {}

    NM_DEVICE void store(const Told& f, const CUtensorMap& map, const Origin& at, const Sum (&sums)[Tile::kDown][Tile::kSums]) {
        const bool rounded = !f.sums.parts && (kByColumn || (f.sums.activation == kNone && !f.sums.residual));
        uint32_t thread = threadIdx.x;
        pin(thread);  // do not keep derived values during the main loop
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

    // Calls f(the sums of a part), with compile-time register numbers.
    template <class F>
    static NM_DEVICE void with_part(uint32_t part, const Sum (&sums)[Tile::kDown][Tile::kSums], const F& f) {
        NM_UNROLL
        for (uint32_t p = 0; p < Tile::kParts; ++p) {
            if (p == part) f(sums[p / Tile::kAcross] + p % Tile::kAcross * (kCols / 2));
        }
    }

    NM_DEVICE void store_rounded(const Told& f, const CUtensorMap& map, int64_t row, int64_t col, uint32_t part,
                                 const Sum (&sums)[Tile::kDown][Tile::kSums], uint32_t thread) {
        const uint32_t lane = thread % 32, warp = thread / 32 % 4, matrix = lane / 8, i = lane % 8;
        const bool first = thread % 128 == 0;
        if (first) bulk_wait_read<1>();  // the part before the previous one has been read
        meet(thread);
        float bias[2] = {0.0f, 0.0f};
        if (!kByColumn && f.sums.bias && row < f.m) {
            bias[0] = to_float(f.sums.bias[row + warp * 16 + lane / 4]);
            bias[1] = to_float(f.sums.bias[row + warp * 16 + lane / 4 + 8]);
        }
        const Steps<T> steps(f, row, col, thread);
        // the lane's address in the first four matrices: 16 rows of the warp, 16 columns. Rows of what is staged have 128 bytes
        const uint32_t buffer = shared_address(staging_) + thread / 128 * Tile::kStaging + turn_ * Tile::kRounded;
        const uint32_t to = kByColumn ? buffer + at_128<128>(int(warp * 16 + matrix % 2 * 8 + i), int(matrix / 2))
                                      : buffer + at_128<128>(int(matrix / 2 * 8 + i), int(warp * 2 + matrix % 2));
        with_part(part, sums, [&](const Sum* d) {
            NM_UNROLL
            for (int j = 0; j < kCols / 16; ++j) {
                uint32_t pairs[4];
                NM_UNROLL
                for (int p = 0; p < 4; ++p) {
                    const int at = 8 * j + 2 * p;
                    pairs[p] = rounded_pair<Out>(steps(d[at], at) + bias[p % 2], steps(d[at + 1], at + 1) + bias[p % 2]);
                }
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

    NM_DEVICE void store_summed(const Told& f, int64_t row_0, int64_t col_0, int of_k, uint32_t part,
                                const Sum (&sums)[Tile::kDown][Tile::kSums], uint32_t thread) const {
        float* const own = reinterpret_cast<float*>(staging_ + thread / 128 * Tile::kStaging);
        meet(thread);  // the previous part has been read
        const Steps<T> steps(f, row_0, col_0, thread);
        const uint32_t first = staged(thread / 32 % 4 * 16 + thread % 32 / 4, thread % 4 * 2);
        with_part(part, sums, [&](const Sum* d) {
            NM_UNROLL
            for (int i = 0; i < kCols / 2; ++i) {
                const int j = i / 4, r = i / 2 % 2, e = i % 2;  // 8 j columns further, 8 r rows, e columns
                own[kByColumn ? (first ^ uint32_t(8 * j)) + 512 * r + e : (first ^ uint32_t(8 * r)) + 512 * j + 64 * e] = steps(d[i], i);
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
            store_eight<Out, kByColumn>(f, eight, residual, at, kByColumn ? col_0 + col : row_0 + row, of_k);
        }
    }

    uint8_t* staging_;
    uint32_t turn_ = 0;
};

}  // namespace nm::cuda::gemm
