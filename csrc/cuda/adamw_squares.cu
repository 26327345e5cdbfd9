// MaskedAdamW of matrices whose masks are transposable, or whose new weight is packed: a thread takes 4x4 elements, all of
// which both orientations need. 2:4 only.
#include "../core/transposable.h"
#include "adamw_blocks.h"
#include "adamw_pack.h"
#include "kernels.h"
#include "launch.h"
#include "quad_masks.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256, kSide = 64;  // of a tile: four warps of 16 columns side by side, two of 32 rows

// Bit 4 r + c of the mask.
template <bool kTransposable>
NM_DEVICE uint32_t mask_square(const Floats<4>* p) {
    if constexpr (kTransposable) {
        float w[16];
        NM_UNROLL
        for (int i = 0; i < 16; ++i) w[i] = p[i / 4].at[i % 4];
        return transposable_2_4(w);
    } else {
        uint32_t mask = 0;
        NM_UNROLL
        for (int r = 0; r < 4; ++r) {
            bool keep[4];
            mask_quad<2, 4>(p[r].at, keep);
            NM_UNROLL
            for (int c = 0; c < 4; ++c) mask |= uint32_t(keep[c]) << (4 * r + c);
        }
        return mask;
    }
}

template <bool kFlat>
NM_DEVICE Place row_of(const AdamWParam& param, int64_t row, int64_t col, bool inside) {
    const int64_t at = kFlat ? row * param.cols + col : col;
    return {row, at, inside ? 4 : 0, inside && param.aligned()};
}

// A thread's square while it steps row after row: indexed at run time, so not in registers, which this saves for warps.
struct Squares {
    alignas(16) float at[4][kThreads][4];

    NM_DEVICE Floats<4> row(int r) const {
        Floats<4> p;
        load_wide<4>(at[r][threadIdx.x], p.at);
        return p;
    }
    NM_DEVICE void set(int r, const Floats<4>& p) { store_wide<4>(at[r][threadIdx.x], p.at); }
};

template <bool kFlat, bool kTransposable>
NM_DEVICE void step_square(const AdamWCurrent& c, const AdamWPack& pack, int layout, const AdamWOptions& o, int64_t tile, Squares& weights, Tally& tally) {
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    int64_t col;
    int64_t row = divided(tile, (c.param.cols + kSide - 1) / kSide, col) * kSide;
    row += warp / 4 * 32 + lane / 4 * 4;
    col = col * kSide + warp % 4 * 16 + lane % 4 * 4;
    const int64_t below = c.param.rows - row;
    const int height = col >= c.param.cols || below <= 0 ? 0 : below < 4 ? int(below) : 4;
    const int dtype = c.param.dtype(kWeight);
    Floats<4> p[4];
    Raw<4> raw[4];
    NM_UNROLL
    for (int r = 0; r < 4; ++r) raw[r] = Walk<kFlat>::template load<4>(c, kWeight, dtype, row_of<kFlat>(c.param, row + r, col, r < height));
    NM_UNROLL
    for (int r = 0; r < 4; ++r) {
        p[r] = widened(raw[r], dtype);
        weights.set(r, p[r]);
    }
    const uint32_t before = mask_square<kTransposable>(p);
    NM_ONE_BY_ONE
    for (int r = 0; r < height; ++r) {
        NM_READ_AGAIN();
        const Place place = row_of<kFlat>(c.param, row + r, col, true);
        Elements<4> e;
        widen_rest(c, o, load_rest<kFlat, 4>(c, o, place), e);
        e.p = weights.row(r);
        bool keep[4];
        NM_UNROLL
        for (int i = 0; i < 4; ++i) keep[i] = before >> (4 * r + i) & 1;
        NM_READ_AGAIN();
        step_elements<true>(c.scalars, o, keep, 4, e, tally);
        NM_READ_AGAIN();
        store_elements<kFlat>(c, o, place, e);
        weights.set(r, e.p);
    }
    NM_UNROLL
    for (int r = 0; r < 4; ++r) p[r] = weights.row(r);
    const uint32_t after = mask_square<kTransposable>(p);
    NM_ONE_BY_ONE
    for (int r = 0; r < height; ++r) {
        Elements<4> e;
        e.p = weights.row(r);
        bool was[4], is[4];
        NM_UNROLL
        for (int i = 0; i < 4; ++i) {
            was[i] = before >> (4 * r + i) & 1;
            is[i] = after >> (4 * r + i) & 1;
        }
        settle_elements<kFlat, true>(c, row_of<kFlat>(c.param, row + r, col, true), was, is, 4, e, tally);
    }
    NM_READ_AGAIN();
    if (pack.values) pack_rows_of({pack.values, pack.indices, int(pack.dtypes & 255), layout, c.param.cols}, p, after, row, col, height);
    if constexpr (kTransposable) {
        if (pack.values_t) pack_columns_of({pack.values_t, pack.indices_t, int(pack.dtypes >> 8), layout, c.param.rows}, p, after, row, col, height);
    }
}

template <bool kFlat, bool kTransposable>
__global__ void __launch_bounds__(kThreads, 2) adamw_square_kernel(AdamWTables tables, AdamWPart part, AdamWOptions o, int layout) {
    NM_SHARED(AdamWCurrent, current);
    NM_SHARED(AdamWPack, pack);
    NM_SHARED(Squares, weights);
    if (is_skipped(o.found)) return;
    Tally tally;
    int64_t row = -1;
    each_tile(tables, part, current, [&](int64_t tile) {
        if (current.row != row) {  // the same for all threads
            row = current.row;
            if (threadIdx.x < kPackWords) {
                reinterpret_cast<int64_t*>(&pack)[threadIdx.x] = tables.packs ? reinterpret_cast<const int64_t*>(tables.packs + row)[threadIdx.x] : 0;
            }
            __syncthreads();
        }
        step_square<kFlat, kTransposable>(current, pack, layout, o, tile, weights, tally);
    });
    put_stats<kThreads>(tables, part, o, tally);
}

}  // namespace

void adamw_squares(const AdamWTables& tables, const AdamWPart& part, bool flat, bool transposable, const AdamWOptions& options, int layout,
                   const Queue& queue) {
    const char* const name = "adamw_square_kernel";
    const Grid grid{part.blocks, kThreads};
    if (flat) {
        launch(name, transposable ? adamw_square_kernel<true, true> : adamw_square_kernel<true, false>, grid, queue, tables, part, options, layout);
    } else {
        launch(name, transposable ? adamw_square_kernel<false, true> : adamw_square_kernel<false, false>, grid, queue, tables, part, options, layout);
    }
}

}  // namespace nm::cuda
