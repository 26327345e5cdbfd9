// MaskedAdamW: one pass over the elements of any number of params, whatever their dtypes, layouts and sizes, in one launch.
//
// A block takes a few tiles, one after another, usually of one param. With the usual patterns a thread has four neighbouring
// elements in its registers, and the lanes of a larger group exchange their keys by shuffles; groups of any other size lie in
// shared memory, an element to a thread.
#include "adamw_blocks.h"
#include "any_groups.h"
#include "kernels.h"
#include "launch.h"
#include "quad_masks.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 128, kBlocks = 5;  // 20 warps of 96 registers on an SM; 24 of 80 spill some (nvcc 13.0, 2026-11-21)
constexpr int kTile = 4096;  // elements of a tile of chunks

constexpr int K = 4;         // elements of a chunk
constexpr int kSteps = kTile / (kThreads * K);

struct Unmasked {
    static constexpr int n = 0, m = K;
};

// Masks that the call brings, a bit for each weight.
struct Held {
    static constexpr int n = 0, m = K;
};

// f(pattern): Unmasked, Held, Fixed or Any.
template <class F>
void by_masks(int n, int m, bool held, const F& f) {
    if (held) return f(Held{});
    if (m == 0) return f(Unmasked{});
    by_pattern(n, m, f);
}

// Where the groups (or chunks) of a param that is not flat lie: number `i` of them in rows of `across`.
NM_DEVICE void locate(const AdamWParam& param, int64_t i, int64_t across, int64_t& row, int64_t& group) {
    if (param.across()) {
        group = divided(i, param.rows, row);
    } else {
        row = divided(i, across, group);
    }
}

// The place of a chunk; count = 0 if it is past the end.
template <bool kFlat, class P>
NM_DEVICE Place place_of(const AdamWParam& param, int64_t chunk) {
    Place place{0, chunk * K, 0, false};
    if (kFlat) {
        place.count = place.col < param.cols ? K : 0;
        return place;
    }
    constexpr int kLanes = P::m / K;  // of a group
    const int64_t across = (param.cols + P::m - 1) / P::m, group = chunk / kLanes;
    if (group >= across * param.rows) return place;
    locate(param, group, across, place.row, place.col);
    place.col = place.col * P::m + chunk % kLanes * K;
    const int64_t left = param.cols - place.col;
    place.count = left >= K ? K : int(left);
    place.wide = param.aligned() && left >= K;
    return place;
}

template <bool kFlat, class P>
NM_DEVICE void step_tile(const AdamWCurrent& c, const AdamWOptions& o, int64_t tile, Tally& tally) {
    constexpr bool kHeld = std::is_same_v<P, Held>, kRanked = P::n > 0, kMasked = kRanked || kHeld, kWhole = kFlat || kRanked;
    // one chunk at a time: more would take the registers that other warps need
    NM_ONE_BY_ONE
    for (int step = 0; step < kSteps; ++step) {
        const int64_t chunk = (tile * kSteps + step) * kThreads + threadIdx.x;
        const Place place = place_of<kFlat, P>(c.param, chunk);
        if (P::m == K && place.count == 0) break;  // lanes that share a group stay together
        const bool inside = P::m == K || place.count > 0;
        const int count = kWhole ? K : place.count;
        Elements<K> e;
        bool before[K]{}, after[K]{};
        if constexpr (kHeld) load_mask(c.param, place, before);
        load_elements<kFlat>(c, o, place, e);
        if constexpr (kRanked) mask_quad<P::n, P::m>(e.p.at, before);
        if (inside) {
            NM_READ_AGAIN();  // or the compiler keeps all scalars, strides and addresses
            step_elements<kMasked, kHeld>(c.scalars, o, before, count, e, tally);
            NM_READ_AGAIN();
            store_elements<kFlat>(c, o, place, e);
        }
        if constexpr (kRanked) mask_quad<P::n, P::m>(e.p.at, after);
        if (inside) settle_elements<kMasked, kHeld>(before, kHeld ? before : after, count, e, tally);
    }
}

// Flat params whose chunks are whole 16 bytes, and others: in one kernel they would take 110 registers.
template <bool kFlat, class P>
__global__ void __launch_bounds__(kThreads, kBlocks) adamw_kernel(AdamWTables tables, AdamWPart part, AdamWOptions o) {
    NM_SHARED(AdamWCurrent, current);
    if (is_skipped(o.found)) return;
    Tally tally;
    each_tile(tables, part, current, [&](int64_t tile) { step_tile<kFlat, P>(current, o, tile, tally); });
    put_stats<kThreads>(tables, part, o, tally);
}

struct AnyWeights {
    float at[AnyTile::kElements];
};

// A tile of any groups: f(number of the element among the thread's, its place in the tile, its Place in memory).
template <class F>
NM_DEVICE void each_element(const AdamWCurrent& c, int64_t tile, int m, const F& f) {
    const int64_t across = c.param.cols / m, first = tile * AnyTile::groups(m);
    const int64_t left = across * c.param.rows - first;
    const int groups = left < AnyTile::groups(m) ? int(left) : AnyTile::groups(m);
    int k = 0;
NM_ONE_BY_ONE
    for (int e = int(threadIdx.x); e < groups * m; e += kThreads, ++k) {
        const bool transposed = c.param.across();  // neighbours are of neighbouring rows
        const int group = transposed ? e % groups : e / m, i = transposed ? e / groups : e % m;
        Place place{0, 0, 1, false};
        locate(c.param, first + group, across, place.row, place.col);
        place.col = place.col * m + i;
        f(k, group * m + i, place);
    }
}

static_assert(AnyTile::kElements / kThreads <= 32);

__global__ void __launch_bounds__(kThreads, kBlocks) adamw_any_kernel(AdamWTables tables, AdamWPart part, AdamWOptions o, int n, int m) {
    NM_SHARED(AdamWCurrent, current);
    NM_SHARED(AnyTile, groups);
    NM_SHARED(AnyWeights, weights);
    if (is_skipped(o.found)) return;
    Tally tally;
    const AdamWCurrent& c = current;
    each_tile(tables, part, current, [&](int64_t tile) {
        uint32_t kept = 0;  // bit k: the thread's k-th element was, before the step
        each_element(c, tile, m, [&](int, int at, const Place& place) {
            groups.keys[at] = Key<float>::of(widened(Walk<false>::load<1>(c, kWeight, c.param.dtype(kWeight), place), c.param.dtype(kWeight)).at[0]);
        });
        __syncthreads();
        each_element(c, tile, m, [&](int k, int at, const Place& place) {
            Elements<1> e;
            const bool before = rank_in_group(groups.keys, at, m) < n;
            kept |= uint32_t(before) << k;
            load_elements<false>(c, o, place, e);
            step_elements<true, false>(c.scalars, o, &before, 1, e, tally);
            store_elements<false>(c, o, place, e);
            weights.at[at] = e.p.at[0];
        });
        __syncthreads();
        each_element(c, tile, m, [&](int, int at, const Place&) { groups.keys[at] = Key<float>::of(weights.at[at]); });
        __syncthreads();
        each_element(c, tile, m, [&](int k, int at, const Place&) {
            Elements<1> e;
            e.p.at[0] = weights.at[at];
            const bool before = kept >> k & 1, after = rank_in_group(groups.keys, at, m) < n;
            settle_elements<true, false>(&before, &after, 1, e, tally);
        });
        __syncthreads();  // the next tile writes the keys
    });
    put_stats<kThreads>(tables, part, o, tally);
}

}  // namespace

AdamWCut adamw_cut(int n, int m) {
    AdamWCut cut{};
    by_masks(n, m, false, [&](auto pattern) {
        using P = decltype(pattern);
        if constexpr (std::is_same_v<P, Any>) {
            cut = {m, AnyTile::groups(m), false};
        } else {
            cut = {P::m, kTile / P::m, true};
        }
    });
    return cut;
}

void adamw_step(const AdamWTables& tables, const AdamWPart& part, bool flat, const AdamWOptions& options, int n, int m, const Queue& queue) {
    const char* const name = "adamw_kernel";
    const Grid grid{part.blocks, kThreads};
    by_masks(n, m, options.held, [&](auto pattern) {
        using P = decltype(pattern);
        if constexpr (std::is_same_v<P, Any>) {
            launch(name, adamw_any_kernel, grid, queue, tables, part, options, n, m);
        } else if (flat) {
            launch(name, adamw_kernel<true, P>, grid, queue, tables, part, options);
        } else {
            launch(name, adamw_kernel<false, P>, grid, queue, tables, part, options);
        }
    });
}

}  // namespace nm::cuda
