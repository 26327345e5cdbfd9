// One pass over a weight: AdamW, then W~ of the new weight as the next step's GEMMs read it; or only W~, of many weights. A block takes tiles of 64 x 64 weights: whole
// tiles of wgmma.sp's metadata both ways. A thread has a 4 x 4 tile in registers: 16 threads read 256 bytes of a row of each of the four
// tensors, 16 bytes each. Packed values leave by way of shared memory, the dense form from registers.
#include "adamw_pack.h"

#include "adamw_blocks.h"
#include "launch.h"
#include "panel.h"
#include "quad_masks.h"
#include "spread.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocks = 2;  // of an SM; with three, some kernels spill 8 bytes (nvcc 13.0)
#else
constexpr int kBlocks = 3;  // 80 registers a thread
#endif
constexpr unsigned kSide = kPackTile;

enum Back : int { kAlone = 0, kColumns = 1, kDense = 2 };  // what is made in addition to the rows

template <int kBack>
struct Panels {
    using Lines = Panel<bf16, Fixed<2, 4>, kSide, kSide / 4, 4, kThreads>;
    struct Nothing {};
    Lines rows;
    std::conditional_t<kBack == kColumns, Lines, Nothing> columns;
};

// A thread's place in a tile of a weight.
struct Spot {
    unsigned rows, cols, row, col, across, down;  // sizes of the weight, the tile's corner, the thread's 4 x 4 tile in it

    NM_DEVICE Spot(int64_t height, int64_t width, unsigned tile) : rows(unsigned(height)), cols(unsigned(width)) {
        const unsigned wide = cols / kSide, band = tile / wide;
        row = band * kSide;
        col = (tile - band * wide) * kSide;
        across = threadIdx.x % 16;
        down = threadIdx.x / 16;
    }
    NM_DEVICE uint64_t first() const { return uint64_t(row + 4 * down) * cols + (col + 4 * across); }
};

// Four bits of each of the thread's rows.
NM_DEVICE uint32_t held_mask(const uint8_t* bits, const Spot& spot) {
    const uint8_t* const from = bits + (spot.first() >> 3);
    uint32_t mask = 0;
    NM_UNROLL
    for (int r = 0; r < 4; ++r) mask |= (uint32_t(from[uint64_t(r) * (spot.cols >> 3)]) >> (spot.across % 2 * 4) & 15u) << (4 * r);
    return mask;
}

// kMayStay: indices that are null stay as they are.
template <bool kMayStay, class Lines>
NM_DEVICE void write_panel(const Lines& panel, const PanelPlace& to) {
    if (kMayStay && !to.indices) return panel.write_values(to);
    panel.write_out(to);
}

// Writes the forms of the thread's sixteen weights, all threads of the block together; returns the mask by which they are pruned.
// Not in the step: there the branch of kMayStay spills registers.
template <int kSelect, int kBack, bool kMayStay = false>
NM_DEVICE uint32_t write_forms(const float* w, uint32_t held, const AdamWForms& to, const Spot& spot, int layout, Panels<kBack>& panels) {
    uint32_t words[16], spread[8], values[4], index, mask = held;
    bool overfull = false;  // what a mask with too many gives is not defined
    memcpy(words, w, sizeof words);
    if constexpr (kSelect == kGiven) {
        round_quad<bf16>(words, spread);
        clear_unkept<bf16>(spread, held);  // here for both ways, or registers spill
        index = pack_given_quad<bf16, bf16>(spread, held, values, overfull);
    } else {
        const float scale = kSelect == kThreshold ? scale_at(to.scale) : 1.0f;
        index = spread_quad<float, bf16, kSelect>(words, mask, scale, spread, values, overfull);
    }
    NM_UNROLL
    for (int r = 0; r < 4; ++r) {
        panels.rows.template put<4>(spot.down, unsigned(r), spot.across, values + r);
        panels.rows.template put_indices<1>(spot.down, unsigned(r), spot.across, index >> (8 * r));
    }
    if constexpr (kBack == kColumns) {
        uint32_t columns[8];
        turn_tile<bf16>(spread, 2, columns);
        const uint32_t indices = pack_given_quad<bf16, bf16>(columns, transposed(held), values, overfull);
        NM_UNROLL
        for (int k = 0; k < 4; ++k) {
            panels.columns.template put<4>(spot.across, unsigned(k), spot.down, values + k);
            panels.columns.template put_indices<1>(spot.across, unsigned(k), spot.down, indices >> (8 * k));
        }
    }
    if constexpr (kBack == kDense) {
        auto* const first = static_cast<bf16*>(to.dense) + spot.first();
        NM_UNROLL
        for (int r = 0; r < 4; ++r) store_global<2>(reinterpret_cast<uint32_t*>(first + uint64_t(r) * spot.cols), spread + 2 * r);
    }
    __syncthreads();
    const unsigned height = spot.rows - spot.row, width = spot.cols - spot.col;
    write_panel<kMayStay>(panels.rows, {to.by_row.values, to.by_row.indices, spot.row, spot.col / 4, height, width / 4, spot.cols / 4, layout});
    if constexpr (kBack == kColumns) {
        const Packed& down = to.by_column;
        write_panel<kMayStay>(panels.columns, {down.values, down.indices, spot.col, spot.row / 4, width, height / 4, spot.rows / 4, layout});
    }
    return mask;
}

template <class T>
struct Four {
    T at[4];

    NM_DEVICE void load(const T* from) { load_streamed<4>(from, at); }
    NM_DEVICE void store(T* to) const { store_global<4>(to, at); }
    NM_DEVICE void read(Floats<4>& to) const {
        NM_UNROLL
        for (int i = 0; i < 4; ++i) to.at[i] = to_float(at[i]);
    }
    NM_DEVICE void write(const Floats<4>& from) {
        NM_UNROLL
        for (int i = 0; i < 4; ++i) at[i] = from_float<T>(from.at[i]);
    }
};

// The step of a thread's sixteen weights, which become `w`, some rows at once; returns the mask before it.
template <class G, int kSelect, int kAtOnce>
NM_DEVICE uint32_t step_square(const AdamWCurrent& c, const AdamWOptions& o, const Spot& spot, uint32_t held, float* w, Tally& tally) {
    const uint64_t first = spot.first();
    const auto at = [&](AdamWTensor which, int row) { return reinterpret_cast<float*>(c.address(which)) + (first + uint64_t(row) * spot.cols); };
    uint32_t mask = held;
    NM_UNROLL
    for (int some = 0; some < 4; some += kAtOnce) {
        Four<float> p[kAtOnce], m[kAtOnce], v[kAtOnce];
        Four<G> g[kAtOnce];
        NM_UNROLL
        for (int r = 0; r < kAtOnce; ++r) {
            p[r].load(at(kWeight, some + r));
            g[r].load(reinterpret_cast<const G*>(c.gradient) + (first + uint64_t(some + r) * spot.cols));
            m[r].load(at(kFirst, some + r));
            v[r].load(at(kSecond, some + r));
        }
        NM_UNROLL
        for (int r = 0; r < kAtOnce; ++r) {
            const int row = some + r;
            Elements<4> e;
            p[r].read(e.p);
            g[r].read(e.g);
            m[r].read(e.m);
            v[r].read(e.v);
            bool before[4];
            if constexpr (kSelect == kGiven) {
                NM_UNROLL
                for (int i = 0; i < 4; ++i) before[i] = held >> (4 * row + i) & 1u;
            } else {
                mask_quad<2, 4>(e.p.at, before);
                NM_UNROLL
                for (int i = 0; i < 4; ++i) mask |= uint32_t(before[i]) << (4 * row + i);
            }
            NM_READ_AGAIN();  // or the compiler keeps all scalars and addresses
            step_elements<true, kSelect == kGiven>(c.scalars, o, before, 4, e, tally);
            NM_READ_AGAIN();
            m[r].write(e.m);
            m[r].store(at(kFirst, row));
            if (!o.frozen) {
                v[r].write(e.v);
                v[r].store(at(kSecond, row));
            }
            p[r].write(e.p);
            p[r].store(at(kWeight, row));
            NM_UNROLL
            for (int i = 0; i < 4; ++i) w[4 * row + i] = e.p.at[i];
        }
    }
    return mask;
}

// kPlain: nothing to unscale or negate, v not frozen, epsilon outside of the root: what a step usually is. With those branches the code
// is more than the instruction caches like.
template <class G, int kSelect, int kBack, bool kPlain>
__global__ void __launch_bounds__(kThreads, kBlocks)
    adamw_pack_kernel(AdamWTables tables, AdamWPart part, AdamWOptions options, const AdamWForms* forms, int layout) {
    NM_SHARED(AdamWCurrent, current);
    NM_SHARED(Panels<kBack>, panels);
    if (is_skipped(options.found)) return;
    Tally tally;
    const AdamWCurrent& c = current;
    AdamWOptions o{};  // its other members are constants to the compiler
    if constexpr (!kPlain) {
        o.scale = options.scale;
        o.frozen = options.frozen;
        o.eps_inside = options.eps_inside;
        o.maximize = options.maximize;
    }
    open_param(tables, tables.owners[blockIdx.x], current);
    const Spot spot(c.param.rows, c.param.cols, blockIdx.x - unsigned(c.param.first));
    const uint32_t held = kSelect == kGiven ? held_mask(reinterpret_cast<const uint8_t*>(c.param.mask), spot) : 0u;
    float w[16];
    const uint32_t before = step_square<G, kSelect, kPlain && !(kSelect == kGiven && kBack == kAlone) ? 2 : 1>(c, o, spot, held, w, tally);
    uint32_t non_zeros = 0;
    NM_UNROLL
    for (int i = 0; i < 16; ++i) non_zeros |= uint32_t(w[i] != 0.0f) << i;
    const uint32_t after = write_forms<kSelect, kBack>(w, held, forms[c.param.index], spot, layout, panels);
    tally.flips = uint32_t(__popc(before ^ after));
    tally.non_zeros = uint32_t(__popc(non_zeros & after));
    put_stats<kThreads>(tables, part, o, tally);
}

// Reads the thread's sixteen weights and writes their forms.
template <int kSelect, int kBack>
NM_DEVICE void make_forms(const float* from, const uint8_t* bits, const AdamWForms& to, const Spot& spot, int layout, Panels<kBack>& panels) {
    const uint32_t held = kSelect == kGiven ? held_mask(bits, spot) : 0u;
    float w[16];
    NM_UNROLL
    for (int r = 0; r < 4; ++r) load_streamed<4>(from + (spot.first() + uint64_t(r) * spot.cols), w + 4 * r);
    write_forms<kSelect, kBack, kSelect == kGiven>(w, held, to, spot, layout, panels);
}

// Of all weights of a call.
template <int kSelect, int kBack>
__global__ void __launch_bounds__(kThreads, 4) pack_forms_kernel(const AdamWParam* params, const int32_t* owners, const AdamWForms* forms, int layout) {
    NM_SHARED(Panels<kBack>, panels);
    const AdamWParam& param = params[owners[blockIdx.x]];
    const Spot spot(param.rows, param.cols, blockIdx.x - unsigned(param.first));
    const auto* const w = reinterpret_cast<const float*>(param.address[kWeight]);
    make_forms<kSelect, kBack>(w, reinterpret_cast<const uint8_t*>(param.mask), forms[param.index], spot, layout, panels);
}

// Of one weight, if it has changed.
template <int kSelect, int kBack>
__global__ void __launch_bounds__(kThreads, 4) forms_kernel(FormsCall call, const int* changed, int mark) {
    NM_SHARED(Panels<kBack>, panels);
    if (*changed != mark) return;
    make_forms<kSelect, kBack>(call.w, call.bits, call.forms, Spot(call.rows, call.cols, blockIdx.x), call.layout, panels);
}

// A thread for four groups of one row of each band of tiles.
template <int kSelect>
__global__ void __launch_bounds__(kThreads) strip_kernel(FormsCall call, unsigned strip, int64_t threads, int* changed, int mark) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= threads) return;
    const unsigned cols = unsigned(call.cols), wide = cols / 16, band = unsigned(i / wide), col = unsigned(i - int64_t(band) * wide) * 16;
    const uint64_t first = uint64_t(band * kSide + strip) * cols + col;
    uint32_t words[16], spread[8], values[4], mask = 0;
    load_streamed<16>(reinterpret_cast<const uint32_t*>(call.w + first), words);
    if constexpr (kSelect == kGiven) mask = uint32_t(call.bits[first >> 3]) | uint32_t(call.bits[(first >> 3) + 1]) << 8;
    bool overfull = false;
    spread_quad<float, bf16, kSelect>(words, mask, kSelect == kThreshold ? scale_at(call.forms.scale) : 1.0f, spread, values, overfull);
    uint32_t packed[4];
    load_streamed<4>(static_cast<const uint32_t*>(call.forms.by_row.values) + first / 4, packed);
    bool same = true;
    NM_UNROLL
    for (int k = 0; k < 4; ++k) same = same && packed[k] == values[k];
    if (!same) *changed = mark;
}

// f(kSelect, kBack) of the combinations that there are.
template <class F>
void by_forms(int select, bool columns, bool dense, const F& f) {
    const auto with = [&](auto rule) {
        // W^T is packed where it is N:M, by a held mask, else dgrad reads the dense form
        constexpr int kBack = decltype(rule)::value == kGiven ? kColumns : kDense;
        if (columns || dense) return f(rule, std::integral_constant<int, kBack>{});
        f(rule, std::integral_constant<int, kAlone>{});
    };
    if (select == kGiven) return with(std::integral_constant<int, kGiven>{});
    if (select == kThreshold) return with(std::integral_constant<int, kThreshold>{});
    with(std::integral_constant<int, kMagnitude>{});
}

}  // namespace

void adamw_pack_step(const AdamWTables& tables, const AdamWPart& part, const AdamWOptions& o, const AdamWPack& pack, const Queue& queue) {
    const bool plain = !o.scale && !o.maximize && !o.frozen && !o.eps_inside;
    by_forms(pack.select, pack.columns, pack.dense, [&](auto rule, auto back) {
        constexpr int kSelect = decltype(rule)::value, kBack = decltype(back)::value;
        const auto with = [&](auto kernel) {
            launch("adamw_pack_kernel", kernel, {part.blocks, kThreads}, queue, tables, part, o, pack.forms, pack.layout);
        };
        if (pack.gradient == kBFloat16) {
            plain ? with(adamw_pack_kernel<bf16, kSelect, kBack, true>) : with(adamw_pack_kernel<bf16, kSelect, kBack, false>);
        } else {
            plain ? with(adamw_pack_kernel<float, kSelect, kBack, true>) : with(adamw_pack_kernel<float, kSelect, kBack, false>);
        }
    });
}

void pack_forms(const int64_t* table, const int32_t* owners, int64_t tiles, const AdamWPack& pack, const Queue& queue) {
    by_forms(pack.select, pack.columns, pack.dense, [&](auto rule, auto back) {
        launch("pack_forms_kernel", pack_forms_kernel<decltype(rule)::value, decltype(back)::value>, {tiles, kThreads}, queue,
               reinterpret_cast<const AdamWParam*>(table), owners, pack.forms, pack.layout);
    });
}

void renew_changed_forms(const FormsCall& call, int strip, int* changed, int mark, const Queue& queue) {
    const int64_t threads = call.rows / kSide * (call.cols / 16), tiles = call.rows / kSide * (call.cols / kSide);
    by_forms(call.select, call.forms.by_column.values, call.forms.dense, [&](auto rule, auto back) {
        constexpr int kSelect = decltype(rule)::value, kBack = decltype(back)::value;
        launch("strip_kernel", strip_kernel<kSelect>, {cdiv(threads, kThreads), kThreads}, queue, call, unsigned(strip), threads, changed, mark);
        launch("forms_kernel", forms_kernel<kSelect, kBack>, {tiles, kThreads}, queue, call, changed, mark);
    });
}

}  // namespace nm::cuda
