// MaskedAdamW on a block: up to kBlock elements that lie one after another in memory, in whole strips of 64 (the last
// filled up with zeros, which take no part). Everything about a strip happens while it is in registers:
//
//   mask before   step: the equations of core/adamw.h and their sums   mask after   settle: flips, non-zeros, masked weight
//
// Where groups do not end with strips, masks are taken of whole blocks, before all steps and after them.
#pragma once

#include <cmath>
#include <type_traits>

#include "../../core/adamw.h"
#include "../kernels.h"
#include "select.h"
#include "simd/spmm_convert.h"

#if defined(__AVX512F__)
#include "simd/adamw_avx512.h"
#elif defined(__AVX2__)
#include "simd/adamw_avx2.h"
#else
#include "simd/adamw_plain.h"
#endif

namespace nm {
namespace {

constexpr int kStrip = 64;
constexpr int kBlock = 256;  // also the largest group

// How many elements ahead the step asks for memory. AMD EPYC (Zen 5), 2 threads, 4096 x 11008, 2026-11-21: 1.13 times the
// time of the bare memory traffic without, 1.07 with 256 or 512, 1.10 with 1024.
constexpr int kStepAhead = 512;

// The parts of a strip's work are pieces of one loop: only inlined do their numbers stay in registers.
#define NM_INLINE inline __attribute__((always_inline))

constexpr int kVectors = kStrip / Floats::width;
using Strip = Floats[kVectors];

// Which elements of a strip.
struct Chosen {
    Flags at[kVectors];

    NM_INLINE static Chosen of(uint64_t bits) {
        Chosen c;
        for (int i = 0; i < kVectors; ++i) c.at[i] = Flags::of(bits >> (i * Floats::width));
        return c;
    }
    NM_INLINE static Chosen of(const Kept64<float>& kept) {
        Chosen c;
        for (int i = 0; i < kVectors; ++i) c.at[i] = Flags::of(kept, i);
        return c;
    }
};

// The masks of a call: called with a strip in registers and where it lies.
struct Unmasked {
    static constexpr bool masked = false;
};

struct TwoOfFour {
    static constexpr bool masked = true;
    NM_INLINE Chosen operator()(const Strip& w, const float*) const {
        Chosen c;
        for (int i = 0; i < kVectors; ++i) c.at[i] = two_of_four(w[i]);
        return c;
    }
};

template <int N, int M>
struct Fixed {
    static constexpr bool masked = true;
    NM_INLINE Chosen operator()(const Strip&, const float* from) const { return Chosen::of(keep64<float, N, M>(from)); }
};

struct AnyPattern {
    static constexpr bool masked = true;
    int n, m;
    KeepFn<float>* keep;
    NM_INLINE Chosen operator()(const Strip&, const float* from) const { return Chosen::of(keep(from, n, m)); }
};

// Groups that strips cut through: the bits of a block's strips.
struct ByGroup {
    static constexpr bool masked = true;
    int n, m;

    void operator()(const float* w, int count, uint64_t* keep) const {
        uint32_t keys[kMaxM];
        uint8_t kept[kMaxM];
        for (int i = 0; i < count; i += kStrip) keep[i / kStrip] = 0;
        for (int first = 0; first < count; first += m) {
            for (int i = 0; i < m; ++i) keys[i] = Key<float>::of(w[first + i]);
            mask_group(keys, n, m, Key<float>::bits, kept);
            for (int i = 0; i < m; ++i) keep[(first + i) / kStrip] |= uint64_t(kept[i]) << ((first + i) % kStrip);
        }
    }
};

// f(the masks of a pattern), the common patterns specialised; n = m = 0: none.
template <class F>
void with_masks(int n, int m, const F& f) {
    if (m == 0) return f(Unmasked{});
    if (n == 2 && m == 4) return f(TwoOfFour{});
    if (n == 1 && m == 4) return f(Fixed<1, 4>{});
    if (n == 2 && m == 8) return f(Fixed<2, 8>{});
    if (n == 1 && m == 8) return f(Fixed<1, 8>{});
    if (n == 4 && m == 8) return f(Fixed<4, 8>{});
    if (n == 1 && m == 16) return f(Fixed<1, 16>{});
    if (n == 1 && m == 32) return f(Fixed<1, 32>{});
    if (const KeepFn<float>* keep = keep_fn<float>(n, m)) return f(AnyPattern{n, m, keep});
    f(ByGroup{n, m});
}

// What a block works on. `dtype` is what new weights are rounded to; `top` is null without amsgrad, `out` if not wanted.
struct Elements {
    int count, dtype;
    float *p, *m, *v, *top, *out;
    const float* g;

    bool whole(int strip) const { return count - strip * kStrip >= kStrip; }
    NM_INLINE Chosen valid(int strip) const { return Chosen::of(whole(strip) ? ~uint64_t(0) : (uint64_t(1) << (count - strip * kStrip)) - 1); }
};

// Running statistics of a tile. Eight fp64 lanes each, which `total` adds up in a fixed order.
struct Tally {
    Doubles change, pruned_weight, pruned_grad;
    Product log_change;
    Floats highest{0.0f};
    Count unchanged, flips, non_zeros;
    int64_t factors = 0;  // in log_change, all lanes together
};

inline double total(const double* lane) { return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7])); }

inline double total(const Doubles& sum) {
    double lane[8];
    sum.store(lane);
    return total(lane);
}

// A strip's terms, none negative, are added in fp32 eight to one; where that overflows, each in fp64.
__attribute__((noinline, cold)) inline Doubles sum_exactly(const Strip& x) {
    Doubles sum;
    for (const Floats& one : x) by_eight(one, [&](const Doubles& terms) { add(sum, terms); });
    return sum;
}

NM_INLINE void sum(Doubles& to, const Strip& x) {
    const auto eight = folded(x);
    if (__builtin_expect(finite(eight), true)) return add(to, widened(eight));
    Strip copy;
    for (int i = 0; i < kVectors; ++i) copy[i] = x[i];
    add(to, sum_exactly(copy));
}

inline void sum_logarithms(Tally& t, const Strip& change, const Chosen& valid) {
    constexpr double smallest = 0x1p-149;  // the smallest fp32 denormal
    for (int i = 0; i < kVectors; ++i) {
        by_eight(choose(valid.at[i], change[i], Floats(1.0f)), [&](const Doubles& eight) { t.log_change.times(eight, smallest); });
    }
    t.factors += kStrip;
}

NM_INLINE void load_strip(const float* from, Strip& to) {
    for (int i = 0; i < kVectors; ++i) to[i] = Floats::load(from + i * Floats::width);
}

// `count` is kStrip: known to the compiler, it would warn of a remainder that there is none of.
inline __attribute__((noinline, noclone)) void round_strip(int dtype, int64_t count, Strip& w) {
    float x[kStrip];
    for (int i = 0; i < kVectors; ++i) w[i].store(x + i * Floats::width);
    by_dtype(dtype, [&](auto tag) {
        decltype(tag) narrow[kStrip];
        from_floats(x, count, narrow);
        to_floats(narrow, count, x);
    });
    load_strip(x, w);
}

NM_INLINE void prefetch_strip(const Elements& e, int at) {
    for (const float* from : {static_cast<const float*>(e.p), e.g, static_cast<const float*>(e.m), static_cast<const float*>(e.v)}) {
        const float* next = from + at + kStepAhead;
        __builtin_prefetch(next);
        __builtin_prefetch(next + 16);
        __builtin_prefetch(next + 32);
        __builtin_prefetch(next + 48);
    }
}

// Usual calls have none of the options that Python's torch.optim.AdamW leaves off by default, and whole strips.
inline bool is_usual(const AdamW& s, const AdamWCall& call, const Elements& e) {
    const bool plain = !s.frozen && !s.eps_inside && !s.maximize && s.clamp == 0.0f;
    return plain && !call.grad_scale && !call.geometric && !e.top && e.count % kStrip == 0;
}

// The gradient as the step takes it; sums over pruned weights.
template <bool kUsual, bool kMasked>
NM_INLINE void take_gradient(const AdamW& s, const AdamWCall& call, const Strip& p, const Chosen& keep, const Chosen& valid, Strip& g, Tally& t) {
    if (!kUsual && call.grad_scale) {
        for (Floats& one : g) one = one / Floats(*call.grad_scale);
    }
    if (!kUsual && s.maximize) {
        for (Floats& one : g) one = -one;
    }
    if constexpr (kMasked) {
        Strip weight, grad;
        for (int i = 0; i < kVectors; ++i) {
            const Flags pruned = kUsual ? ~keep.at[i] : ~keep.at[i] & valid.at[i];
            weight[i] = kept(pruned, magnitude(p[i]));
            grad[i] = kept(pruned, magnitude(g[i]));
        }
        sum(t.pruned_weight, weight);
        sum(t.pruned_grad, grad);
        if (s.decay == 0.0f) return;
        for (int i = 0; i < kVectors; ++i) g[i] = choose(keep.at[i], g[i], g[i] + (Floats(s.decay) * p[i]));
    }
}

// v <- its new value, what the update divides by
template <bool kUsual>
NM_INLINE void second_moment(const AdamW& s, const AdamWCall& call, const Elements& e, int at, const Strip& g, const Chosen& valid, Strip& v, Tally& t) {
    load_strip(e.v + at, v);
    if (!kUsual && s.frozen) return;
    Strip change;
    for (int i = 0; i < kVectors; ++i) {
        const Floats old = v[i];
        v[i] = adamw_second(s, old, g[i]);
        v[i].store(e.v + at + i * Floats::width);
        change[i] = magnitude(v[i] - old);
        if constexpr (!kUsual) {
            change[i] = kept(valid.at[i], change[i]);
            if (call.geometric) t.unchanged.add(equal(v[i], old) & valid.at[i]);
        }
    }
    sum(t.change, change);
    if (!kUsual && call.geometric) sum_logarithms(t, change, valid);
    if (!kUsual && e.top) {
        for (int i = 0; i < kVectors; ++i) {
            float* top = e.top + at + i * Floats::width;
            v[i] = larger(Floats::load(top), v[i]);
            v[i].store(top);
        }
    }
}

// p <- the weights after the step, where they are stored too
template <bool kUsual, bool kMasked>
NM_INLINE void step_strip(const AdamW& s, const AdamWCall& call, const Elements& e, int at, const Chosen& keep, Strip& p, Tally& t) {
    const Chosen valid = kUsual ? Chosen{} : e.valid(at / kStrip);
    Strip g, v;
    load_strip(e.g + at, g);
    take_gradient<kUsual, kMasked>(s, call, p, keep, valid, g, t);
    second_moment<kUsual>(s, call, e, at, g, valid, v, t);
    for (int i = 0; i < kVectors; ++i) {
        float* first = e.m + at + i * Floats::width;
        const Floats m = adamw_first(s, Floats::load(first), g[i]);
        m.store(first);
        Floats u = adamw_update(s, m, v[i]);
        if (!kUsual) u = kept(valid.at[i], u);
        t.highest = higher(t.highest, magnitude(u));
        if (!kUsual && s.clamp != 0.0f) u = clamped(u, Floats(s.clamp));
        p[i] = adamw_apply(s, Floats::load(e.p + at + i * Floats::width), u);  // from memory: registers are short
    }
    if (e.dtype != kFloat32) {
        Strip rounded;  // only this copy has an address: p stays in registers
        for (int i = 0; i < kVectors; ++i) rounded[i] = p[i];
        round_strip(e.dtype, kStrip, rounded);
        for (int i = 0; i < kVectors; ++i) p[i] = rounded[i];
    }
    for (int i = 0; i < kVectors; ++i) p[i].store(e.p + at + i * Floats::width);
}

// The statistics that depend on the new mask, and w = the weight where that keeps it, +0.0 elsewhere.
template <bool kUsual, bool kMasked>
NM_INLINE void settle_strip(const Elements& e, int at, const Chosen& before, const Chosen& now, const Strip& w, Tally& t) {
    const Chosen valid = kUsual ? Chosen{} : e.valid(at / kStrip);
    for (int i = 0; i < kVectors; ++i) {
        if constexpr (kMasked) {
            const Flags flips = before.at[i] ^ now.at[i];
            t.flips.add(kUsual ? flips : flips & valid.at[i]);
        }
        Flags found = unequal(w[i], Floats(0.0f));
        if (kMasked) found = found & now.at[i];
        t.non_zeros.add(kUsual ? found : found & valid.at[i]);
    }
    if (!e.out) return;
    for (int i = 0; i < kVectors; ++i) (kMasked ? kept(now.at[i], w[i]) : w[i]).store(e.out + at + i * Floats::width);
}

// A strip is settled after the next one's step: its chain of roots and divisions is long, and this waits for its end.
// AMD EPYC (Zen 5), AVX-512, in L2, one thread, 2026-11-21: 0.38 ns a weight with 2:4 masks; 0.43 settled at once.
template <bool kUsual, class Masks>
void step_block(const AdamW& scalars, const AdamWCall& call, const Elements& on, const Masks& masks, Tally& tally) {
    const AdamW s = scalars;  // copies, which no store can change
    const Elements e = on;
    Tally t = tally;
    Chosen last{};
    for (int at = 0; at < e.count + kStrip; at += kStrip) {
        Chosen before{}, now{};
        Strip w;
        if (at < e.count) {
            prefetch_strip(e, at);
            load_strip(e.p + at, w);
            if constexpr (Masks::masked) before = masks(w, e.p + at);
            step_strip<kUsual, Masks::masked>(s, call, e, at, before, w, t);
        }
        if (at > 0) {
            load_strip(e.p + at - kStrip, w);
            if constexpr (Masks::masked) now = masks(w, e.p + at - kStrip);
            settle_strip<kUsual, Masks::masked>(e, at - kStrip, last, now, w, t);
        }
        last = before;
    }
    tally = t;
}

inline void step_block(const AdamW& s, const AdamWCall& call, const Elements& e, const ByGroup& masks, Tally& t) {
    uint64_t before[kBlock / kStrip], now[kBlock / kStrip];
    Strip p;
    masks(e.p, e.count, before);
    for (int at = 0; at < e.count; at += kStrip) {
        load_strip(e.p + at, p);
        step_strip<false, true>(s, call, e, at, Chosen::of(before[at / kStrip]), p, t);
    }
    masks(e.p, e.count, now);
    for (int at = 0; at < e.count; at += kStrip) {
        load_strip(e.p + at, p);
        settle_strip<false, true>(e, at, Chosen::of(before[at / kStrip]), Chosen::of(now[at / kStrip]), p, t);
    }
}

template <class Masks>
void step_any(const AdamW& s, const AdamWCall& call, const Elements& e, const Masks& masks, Tally& t) {
    if constexpr (std::is_same_v<Masks, ByGroup>) {
        step_block(s, call, e, masks, t);
    } else if (is_usual(s, call, e)) {
        step_block<true>(s, call, e, masks, t);
    } else {
        step_block<false>(s, call, e, masks, t);
    }
}

}  // namespace
}  // namespace nm
