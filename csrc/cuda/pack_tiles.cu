// Packs along columns, both ways, or for tensor cores: tiles of W are read once. A thread packs a few groups in registers and
// stores them to shared memory, from which the packed operands are written in wide pieces. The dense form of rows leaves from registers.
//
// Both ways with a transposable mask takes 29.8 issue slots per bf16 element on sm_90a (nvcc 13.0, 2026-11-23, counted on
// the shortest path through the machine code): reading 1.3, the search with its conversions 18.7, packing twice 4.6, writing out 5.2. Possible
// savings: byte-permutation constants that the compiler recomputes (0.7) and edge checks in full tiles (0.8); 27 would need a
// shorter search.
#include "../core/transposable.h"
#include "launch.h"
#include "panel.h"
#include "spread.h"

namespace nm::cuda {

namespace {

constexpr int kColumns = 64;                  // of a tile
constexpr int64_t kLongest = 0x7fffffff / 2;  // rows and columns are 32-bit to save registers

// A thread processes one group of rows, 16 bytes of each. A warp is 8 threads wide, so it reads 128 bytes of 4 groups' rows.
template <class In, class P, int kSelect>
struct Tile {
    static constexpr int kWide = 16 / int(sizeof(In));  // columns of a thread
    static constexpr int kAcross = kColumns / kWide;
    // The search of a transposable mask takes 80 registers a thread, others 64, and groups of 16 take 128. So several blocks fit,
    // and some compute while others wait for memory.
    static constexpr int kResident = kSelect == kTransposable ? 768 : P::m <= 8 ? 1024 : 512;
    static constexpr int kDown = kSelect == kTransposable && kAcross > 8 ? 16 : 32;  // groups of a column
    static constexpr int kRows = kDown * P::m, kThreads = kAcross * kDown, kBlocks = kResident / kThreads;
};

template <class In, class Out, class P, int kSelect, bool kByRow, bool kByColumn>
struct Shared {
    using T = Tile<In, P, kSelect>;
    struct Nothing {};
    using Rows = Panel<Out, P, T::kRows, kColumns / P::m, P::m, T::kThreads>;
    using Columns = Panel<Out, P, kColumns, T::kDown, T::kWide, T::kThreads>;
    std::conditional_t<kByRow, Rows, Nothing> rows;
    std::conditional_t<kByColumn, Columns, Nothing> columns;
};

// A thread's place in its tile.
template <class In>
struct Lane {
    unsigned across, down;

    NM_DEVICE Lane() {
        constexpr unsigned warps = kColumns * sizeof(In) / 128;  // beside each other
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        across = warp % warps * 8 + lane % 8;
        down = warp / warps * 4 + lane / 8;
    }
};

// The mask of a 4x4 tile, by its rows. `flags`: a word of four bytes for each row.
template <class In, int kSelect>
NM_DEVICE uint32_t tile_mask(const uint32_t* rows, const uint32_t* flags) {
    if constexpr (kSelect == kGiven) {
        return transposed(joined_nibbles(flags[0] | flags[1] << 1 | flags[2] << 2 | flags[3] << 3));
    } else {
        float w[16];
        NM_UNROLL
        for (int i = 0; i < 16; ++i) w[i] = to_float(of_bits<In>(element<In>(rows, i)));
        return transposable_2_4(w);
    }
}

template <class In, class Out, int kSelect>
NM_DEVICE uint32_t pack_one_quad(uint32_t* words, uint32_t mask, float scale, uint32_t* values, bool& overfull) {
    if constexpr (kSelect == kGiven) {
        return pack_given_quad<In, Out>(words, mask, values, overfull);
    } else if constexpr (kSelect == kTransposable) {
        quad_values<In, Out, kSelect>(words, mask, nullptr, scale, values);
        return index_bytes_of(mask);
    } else {
        return pack_largest_quad<In, Out, kSelect>(words, scale, values);
    }
}

// 2:4: the 4x4 tiles of a thread; `dense`: where the first of its weights goes, in rows of `cols`.
template <class In, class Out, int kSelect, bool kByRow, bool kByColumn, bool kDense, class S>
NM_DEVICE void pack_quads(const uint32_t* words, const uint32_t* flags, float scale, S& shared, bool& overfull, Out* dense, unsigned cols) {
    constexpr int kWide = 16 / int(sizeof(In)), kTiles = kWide / 4, kWords = int(sizeof(In)), kPair = 2 * int(sizeof(Out)) / 4;
    constexpr int kSpread = int(sizeof(Out));  // words of four elements
    const Lane<In> lane;
    uint32_t beside[4][kTiles * kPair], indices[kTiles];  // values of the four rows
    uint32_t across[4][kTiles * kSpread];                 // and all of their elements
    NM_UNROLL
    for (int t = 0; t < kTiles; ++t) {
        uint32_t rows[4 * kWords], mask = 0, values[4 * kPair], tile_flags[4];
        NM_UNROLL
        for (int r = 0; r < 4; ++r) {
            tile_flags[r] = flags[r * kTiles + t];
            NM_UNROLL
            for (int i = 0; i < kWords; ++i) rows[r * kWords + i] = words[r * 4 + t * kWords + i];
        }
        if constexpr (kSelect == kGiven || kSelect == kTransposable) mask = tile_mask<In, kSelect>(rows, tile_flags);
        if constexpr (kByColumn) {
            uint32_t columns[4 * kWords];
            turn_tile<In>(rows, kWords, columns);
            const uint32_t index = pack_one_quad<In, Out, kSelect>(columns, transposed(mask), scale, values, overfull);
            NM_UNROLL
            for (int c = 0; c < 4; ++c) {
                shared.columns.template put<4 * kPair>(lane.across, 4 * t + c, lane.down, values + c * kPair);
                shared.columns.template put_indices<1>(lane.across, 4 * t + c, lane.down, index >> (8 * c));
            }
        }
        if constexpr (kDense) {
            uint32_t spread[16 * sizeof(Out) / 4];
            indices[t] = spread_quad<In, Out, kSelect>(rows, mask, scale, spread, values, overfull);
            NM_UNROLL
            for (int r = 0; r < 4; ++r) {
                NM_UNROLL
                for (int i = 0; i < kSpread; ++i) across[r][t * kSpread + i] = spread[r * kSpread + i];
            }
        } else if constexpr (kByRow) {
            indices[t] = pack_one_quad<In, Out, kSelect>(rows, mask, scale, values, overfull);
        }
        if constexpr (kByRow) {
            NM_UNROLL
            for (int r = 0; r < 4; ++r) {
                NM_UNROLL
                for (int i = 0; i < kPair; ++i) beside[r][t * kPair + i] = values[r * kPair + i];
            }
        }
    }
    if constexpr (kDense) {
        NM_UNROLL
        for (int r = 0; r < 4; ++r) store_global<kTiles * kSpread>(reinterpret_cast<uint32_t*>(dense + uint64_t(r) * cols), across[r]);
    }
    if constexpr (kByRow) {
        NM_UNROLL
        for (int r = 0; r < 4; ++r) {
            shared.rows.template put<4 * kTiles * kPair>(lane.down, r, lane.across * kTiles, beside[r]);
            const uint32_t pair = __byte_perm(indices[0], indices[kTiles - 1], uint32_t(r | (r + 4) << 4));
            const uint32_t index = kTiles == 1 ? indices[0] >> (8 * r) : pair;
            shared.rows.template put_indices<kTiles>(lane.down, r, lane.across * kTiles, index);
        }
    }
}

// Other small patterns, along columns.
template <class In, class Out, class P, int kSelect, class S>
NM_DEVICE void pack_columns(const uint32_t* words, const uint32_t* flags, S& shared, bool& overfull) {
    constexpr int kWide = 16 / int(sizeof(In)), M = P::m, kGroup = M * int(sizeof(In)) / 4;
    const Lane<In> lane;
    uint32_t bits[kWide / 4][(M + 7) / 8] = {};  // of a mask: a byte for each column
    if constexpr (kSelect == kGiven) {
        NM_UNROLL
        for (int i = 0; i < M * kWide / 4; ++i) bits[i % (kWide / 4)][i / (kWide / 4) / 8] |= flags[i] << (i / (kWide / 4) % 8);
    }
    NM_UNROLL
    for (int c = 0; c < kWide; ++c) {
        uint32_t group[kGroup], values[P::n], mask = 0;
        NM_UNROLL
        for (int i = 0; i < kGroup; ++i) {
            if constexpr (sizeof(In) == 4) {
                group[i] = words[i * 4 + c];
            } else {
                group[i] = __byte_perm(words[2 * i * 4 + c / 2], words[(2 * i + 1) * 4 + c / 2], c % 2 ? 0x7632 : 0x5410);
            }
        }
        if constexpr (kSelect == kGiven) {
            NM_UNROLL
            for (int i = 0; i < (M + 7) / 8; ++i) mask |= (bits[c / 4][i] >> (c % 4 * 8) & 0xffu) << (8 * i);
            overfull = overfull || __popc(mask) > P::n;
        }
        const SmallGroup<In, P> small = kSelect == kGiven ? SmallGroup<In, P>(group, mask) : SmallGroup<In, P>(group);
        NM_UNROLL
        for (int k = 0; k < P::n; ++k) values[k] = bits_of(converted<In, Out>(of_bits<In>(small.kept[k])));
        if constexpr (sizeof(Out) == 2 && P::n == 2) values[0] = __byte_perm(values[0], values[1], 0x5410);
        shared.columns.template put<P::n * int(sizeof(Out))>(lane.across, c, lane.down, values);
        shared.columns.template put_indices<1>(lane.across, c, lane.down, small.code);
    }
}

template <class In, class Out, class P, int kSelect, bool kByRow, bool kByColumn, bool kDense>
__global__ void __launch_bounds__(Tile<In, P, kSelect>::kThreads, Tile<In, P, kSelect>::kBlocks)
    pack_tiles_kernel(const In* w, const uint8_t* mask, const float* scale, Packed by_row, Packed by_column, Out* dense, unsigned rows,
                      unsigned cols, Divider tiles, int layout, int* overfull) {
    using T = Tile<In, P, kSelect>;
    using S = Shared<In, Out, P, kSelect, kByRow, kByColumn>;
    NM_SHARED(S, shared);
    const unsigned band = tiles.quotient(blockIdx.x), row = band * T::kRows, column = (blockIdx.x - band * tiles.divisor) * kColumns;
    const unsigned height = rows - row, width = cols - column;  // or more than a tile's
    const Lane<In> lane;
    if (lane.down * P::m < height && lane.across * T::kWide < width) {
        uint32_t words[P::m * 4], flags[P::m * T::kWide / 4] = {};  // of a given mask
        const uint64_t first = uint64_t(row + lane.down * P::m) * cols + (column + lane.across * T::kWide);
        NM_UNROLL
        for (int r = 0; r < P::m; ++r) load_wide<4>(reinterpret_cast<const uint32_t*>(w + first + uint64_t(r) * cols), words + 4 * r);
        if constexpr (kSelect == kGiven) {
            NM_UNROLL
            for (int r = 0; r < P::m; ++r) {
                load_wide<T::kWide / 4>(reinterpret_cast<const uint32_t*>(mask + first + uint64_t(r) * cols), flags + r * T::kWide / 4);
            }
        }
        bool many = false;
        if constexpr (P::n == 2 && P::m == 4) {
            const float factor = kSelect == kThreshold ? scale_at(scale) : 1.0f;
            pack_quads<In, Out, kSelect, kByRow, kByColumn, kDense>(words, flags, factor, shared, many, dense + first, cols);
        } else {
            pack_columns<In, Out, P, kSelect>(words, flags, shared, many);
        }
        if (kSelect == kGiven && many) *overfull = 1;
    }
    __syncthreads();
    if constexpr (kByRow) {
        shared.rows.write_out({by_row.values, by_row.indices, row, column / P::m, height, width / P::m, cols / P::m, layout});
    }
    if constexpr (kByColumn) {
        shared.columns.write_out({by_column.values, by_column.indices, column, row / P::m, width, height / P::m, rows / P::m, layout});
    }
}

template <class In, class Out, class P, int kSelect, bool kByRow, bool kByColumn, bool kDense = false>
void run(const char* name, const Pack& call, const Queue& queue) {
    using T = Tile<In, P, kSelect>;
    const int64_t across = cdiv(call.cols, kColumns), blocks = cdiv(call.rows, T::kRows) * across;
    launch(name, pack_tiles_kernel<In, Out, P, kSelect, kByRow, kByColumn, kDense>, {blocks, T::kThreads}, queue,
           static_cast<const In*>(call.w), call.mask, call.scale, call.by_row, call.by_column, static_cast<Out*>(call.dense),
           unsigned(call.rows), unsigned(call.cols), Divider(across), call.layout, call.overfull);
}

// Whether an operand's lines with that many groups are whole pieces.
bool whole_lines(const Packed& to, int64_t groups, const Pack& call) {
    if (!to.values) return true;
    const int64_t values = groups * call.n * (call.out_dtype == kFloat32 ? 4 : 2), bits = groups * call.n * index_bits(call.m);
    return multiples_of_16(to.values, to.indices, values) && (call.layout != kCanonical || bits % 32 == 0);
}

template <class In, class Out, int kSelect>
bool run_2_4(const Pack& call, const Queue& queue) {
    using P = Fixed<2, 4>;
    const bool by_row = call.by_row.values, by_column = call.by_column.values;
    if (call.dense) {
        // a transposable mask is held between its searches, and then a given one
        constexpr bool kHas = sizeof(Out) == 2 && kSelect != kTransposable;
        if constexpr (kHas) {
            if (by_row && !by_column) run<In, Out, P, kSelect, true, false, true>("pack_dense_kernel", call, queue);
            if (!by_row && !by_column) run<In, Out, P, kSelect, false, false, true>("prune_dense_kernel", call, queue);
        }
        return kHas && !by_column;
    }
    if (by_row && by_column) {
        if constexpr (kSelect == kGiven || kSelect == kTransposable) run<In, Out, P, kSelect, true, true>("pack_both_kernel", call, queue);
        return kSelect == kGiven || kSelect == kTransposable;
    }
    if (by_column) return run<In, Out, P, kSelect, false, true>("pack_columns_kernel", call, queue), true;
    return run<In, Out, P, kSelect, true, false>("pack_tiles_kernel", call, queue), true;
}

}  // namespace

bool pack_tiles(const Pack& call, const Queue& queue) {
    const int wide = call.dtype == kFloat32 ? 4 : 8;
    if (call.rows % call.m || call.cols % wide || !multiples_of_16(call.w, call.mask, call.dense)) return false;
    if (call.rows > kLongest || call.cols > kLongest) return false;
    if (!whole_lines(call.by_row, call.cols / call.m, call) || !whole_lines(call.by_column, call.rows / call.m, call)) return false;
    bool done = false;
    by_usual_dtypes(call.dtype, call.out_dtype, [&](auto in, auto out) {
        using In = decltype(in);
        using Out = decltype(out);
        by_pattern(call.n, call.m, [&](auto pattern) {
            using P = decltype(pattern);
            if constexpr (P::capacity == kMaxM) return;
            else if constexpr (P::n == 2 && P::m == 4) {
                switch (call.select) {
                    case kMagnitude: done = run_2_4<In, Out, kMagnitude>(call, queue); break;
                    case kTransposable: done = run_2_4<In, Out, kTransposable>(call, queue); break;
                    case kGiven: done = run_2_4<In, Out, kGiven>(call, queue); break;
                    default: done = run_2_4<In, Out, kThreshold>(call, queue);
                }
            } else if (!call.by_row.values && !call.dense && (call.select == kMagnitude || call.select == kGiven)) {
                if (call.select == kMagnitude) run<In, Out, P, kMagnitude, false, true>("pack_columns_kernel", call, queue);
                if (call.select == kGiven) run<In, Out, P, kGiven, false, true>("pack_columns_given_kernel", call, queue);
                done = true;
            }
        });
    });
    return done;
}

}  // namespace nm::cuda
