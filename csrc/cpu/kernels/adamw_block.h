// MaskedAdamW on a block: up to kBlock elements that lie one after another in memory, in whole strips of 64 (the last
// filled up with zeros, which take no part). All of it happens to a strip while it is in the first-level cache:
//
//   mask before   step: the equations of core/adamw.h and their sums   mask after   settle: flips, non-zeros
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

// A strip's sums add up in fp32, each term times kScale in the same rounding: so many of the largest do not overflow.
constexpr float kScale = 0x1p-8f;

// The parts of a strip's work are pieces of one loop: only inlined do their numbers stay in registers.
#define NM_INLINE inline __attribute__((always_inline))

constexpr int kVectors = kStrip / Floats::width;

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

// The masks of a call: `of` is called with where a strip lies, `at` with what that gave and the i-th part of the strip.
struct Unmasked {
    static constexpr bool masked = false;
    struct Kept {};
    NM_INLINE Kept of(const float*) const { return {}; }
    NM_INLINE Flags at(const Kept&, int, const Floats&) const { return Flags::of(~uint64_t(0)); }
};

struct TwoOfFour {
    static constexpr bool masked = true;
    struct Kept {};
    NM_INLINE Kept of(const float*) const { return {}; }
    NM_INLINE Flags at(const Kept&, int, const Floats& w) const { return two_of_four(w); }
};

template <int N, int M>
struct Fixed {
    static constexpr bool masked = true;
    using Kept = Chosen;
    NM_INLINE Kept of(const float* from) const { return Chosen::of(keep64<float, N, M>(from)); }
    NM_INLINE Flags at(const Kept& kept, int i, const Floats&) const { return kept.at[i]; }
};

struct AnyPattern {
    static constexpr bool masked = true;
    using Kept = Chosen;
    int n, m;
    KeepFn<float>* keep;
    NM_INLINE Kept of(const float* from) const { return Chosen::of(keep(from, n, m)); }
    NM_INLINE Flags at(const Kept& kept, int i, const Floats&) const { return kept.at[i]; }
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

// What a block works on. `dtype` is what new weights are rounded to; `top` is null without amsgrad.
struct Elements {
    int count, dtype;
    float *p, *m, *v, *top;
    const float* g;

    bool whole(int strip) const { return count - strip * kStrip >= kStrip; }
    NM_INLINE Chosen valid(int strip) const {
        return Chosen::of(whole(strip) ? ~uint64_t(0) : (uint64_t(1) << (count - strip * kStrip)) - 1);
    }
};

// Running statistics of a tile. Eight fp64 lanes each, which `total` adds up in a fixed order; sums are times kScale.
struct Tally {
    Doubles change, pruned_weight, pruned_grad;
    Product log_change;
    Floats highest{0.0f};
    Count unchanged, flips, non_zeros;
    int64_t factors = 0;  // in log_change, all lanes together
};

// The same of a strip's sums.
struct Sums {
    Floats change{0.0f}, pruned_weight{0.0f}, pruned_grad{0.0f};
};

inline double total(const double* lane) { return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7])); }

inline double total(const Doubles& sum) {
    double lane[8];
    sum.store(lane);
    return total(lane);
}

inline void times_logarithm(Tally& t, const Floats& change, const Flags& valid) {
    constexpr double smallest = 0x1p-149;  // the smallest fp32 denormal
    by_eight(choose(valid, change, Floats(1.0f)), [&](const Doubles& eight) { t.log_change.times(eight, smallest); });
    t.factors += Floats::width;
}

// `count` is kStrip: known to the compiler, it would warn of a remainder that there is none of.
inline __attribute__((noinline, noclone)) void round_strip(int dtype, int64_t count, float* x) {
    by_dtype(dtype, [&](auto tag) {
        decltype(tag) narrow[kStrip];
        from_floats(x, count, narrow);
        to_floats(narrow, count, x);
    });
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

// The numbers of a step as every lane takes them, and its options.
struct Scalars {
    Same b1, omb1, b2, omb2, ibc1, bc2, sbc2, eps, wdf, lr, decay, clamp;
    bool frozen, eps_inside, maximize, decays, clamps, geometric;
    const float* grad_scale;

    Scalars(const AdamW& s, const AdamWCall& call)
        : b1(s.b1), omb1(s.omb1), b2(s.b2), omb2(s.omb2), ibc1(s.ibc1), bc2(s.bc2), sbc2(s.sbc2), eps(s.eps), wdf(s.wdf), lr(s.lr),
          decay(s.decay), clamp(s.clamp), frozen(s.frozen), eps_inside(s.eps_inside), maximize(s.maximize), decays(s.decay != 0.0f),
          clamps(s.clamp != 0.0f), geometric(call.geometric), grad_scale(call.grad_scale) {}
};

NM_INLINE void include(Floats& sum, const Floats& terms) { sum = add_scaled(sum, kScale, terms); }

// The gradient as the step takes it; `keep` is the mask of the weights before it.
template <bool kUsual, bool kMasked>
NM_INLINE Floats take_gradient(const Scalars& s, const Elements& e, int at, const Flags& keep, const Flags& valid, Sums& sums) {
    const Floats p = Floats::load(e.p + at);
    Floats g = Floats::load(e.g + at);
    if (!kUsual && s.grad_scale) g = g / Floats(*s.grad_scale);
    if (!kUsual && s.maximize) g = -g;
    if constexpr (kMasked) {
        const Floats size = magnitude(g);
        include(sums.pruned_weight, dropped(keep, magnitude(p)));
        include(sums.pruned_grad, dropped(keep, kUsual ? size : kept(valid, size)));
        if (s.decays) g = choose(keep, g, g + (Floats(s.decay) * p));
    }
    return g;
}

// v, and the largest that it was.
template <bool kUsual>
NM_INLINE void second_moment(const Scalars& s, const Elements& e, int at, const Floats& g, const Flags& valid, Sums& sums,
                             Tally& t) {
    if (!kUsual && s.frozen) return;
    const Floats old = Floats::load(e.v + at), v = adamw_second(s, old, g);
    v.store(e.v + at);
    Floats change = magnitude(v - old);
    if constexpr (!kUsual) {
        change = kept(valid, change);
        if (s.geometric) {
            t.unchanged.add(equal(v, old) & valid);
            times_logarithm(t, change, valid);
        }
        if (e.top) larger(Floats::load(e.top + at), v).store(e.top + at);
    }
    include(sums.change, change);
}

template <bool kUsual, bool kMasked>
NM_INLINE void step_moments(const Scalars& s, const Elements& e, int at, const Flags& keep, const Flags& valid, Sums& sums,
                            Tally& t) {
    const Floats g = take_gradient<kUsual, kMasked>(s, e, at, keep, valid, sums);
    second_moment<kUsual>(s, e, at, g, valid, sums, t);
    adamw_first(s, Floats::load(e.m + at), g).store(e.m + at);
}

template <bool kUsual>
NM_INLINE Floats denominator(const Scalars& s, const Elements& e, int at) {
    return adamw_denominator(s, Floats::load((kUsual || !e.top ? e.v : e.top) + at));
}

template <bool kUsual>
NM_INLINE void step_weights(const Scalars& s, const Elements& e, int at, const Floats& denominator, const Flags& valid, Tally& t) {
    Floats u = adamw_quotient(s, Floats::load(e.m + at), denominator);
    if (!kUsual) u = kept(valid, u);
    t.highest = higher(t.highest, magnitude(u));
    if (!kUsual && s.clamps) u = clamped(u, Floats(s.clamp));
    adamw_apply(s, Floats::load(e.p + at), u).store(e.p + at);
}

// Counts what depends on the new mask: the flips, and the non-zeros that it keeps.
template <bool kUsual, bool kMasked>
NM_INLINE void settle(const Floats& w, const Flags& before, const Flags& now, const Flags& valid, Tally& t) {
    if constexpr (kMasked) {
        const Flags flips = before ^ now;
        t.flips.add(kUsual ? flips : flips & valid);
    }
    Flags full = unequal(w, Floats(0.0f));
    if (kMasked) full = full & now;
    t.non_zeros.add(kUsual ? full : full & valid);
}

NM_INLINE void add(Tally& t, const Sums& sums) {
    add(t.change, folded(sums.change));
    add(t.pruned_weight, folded(sums.pruned_weight));
    add(t.pruned_grad, folded(sums.pruned_grad));
}

// What is known of a strip: its mask before the step, and which of it are elements.
struct Known {
    Chosen before, valid;
};

// The part of a strip that is settled: the new mask of it is taken here where that needs no other part.
template <bool kUsual, class Masks>
NM_INLINE void settle_part(const Elements& e, int strip, int i, const Masks& masks, const typename Masks::Kept& now, const Known& known,
                           Tally& t) {
    const Floats w = Floats::load(e.p + (strip + i * Floats::width));
    settle<kUsual, Masks::masked>(w, known.before.at[i], masks.at(now, i, w), known.valid.at[i], t);
}

// From the first mask of some elements through root and divisions to their last is a long way, and a processor looks ahead
// not even that far. So each part of a strip takes its steps in the company of others that wait for nothing: its moments
// beside the denominator of the part before, the weights of that before it, and the new mask of a part of the last strip.
template <bool kUsual, bool kSteps, bool kSettles, class Masks>
NM_INLINE void step_strip(const Scalars& s, const Elements& e, int strip, const Masks& masks, Known& mine, const Known& last,
                          float* denominators, Tally& t) {
    constexpr int kWidth = Floats::width;
    const int settled = strip - kStrip;
    typename Masks::Kept old, now;
    Sums sums;
    if constexpr (kSteps) old = masks.of(e.p + strip);
    if constexpr (kSteps && !kUsual) mine.valid = e.valid(strip / kStrip);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
        const int at = strip + i * kWidth, one = (i + kVectors - 1) % kVectors, two = (i + kVectors - 2) % kVectors;
        if constexpr (kSteps) {
            Flags& keep = mine.before.at[i];  // in place: g++ 12 copies flags by halves
            if constexpr (Masks::masked) keep = masks.at(old, i, Floats::load(e.p + at));
            step_moments<kUsual, Masks::masked>(s, e, at, keep, mine.valid.at[i], sums, t);
        }
        if (i >= 1 ? kSteps : kSettles) denominator<kUsual>(s, e, at - kWidth).store(denominators + one * kWidth);
        if (i >= 2 ? kSteps : kSettles) {
            const Floats by = Floats::load(denominators + two * kWidth);
            step_weights<kUsual>(s, e, at - 2 * kWidth, by, (i >= 2 ? mine : last).valid.at[two], t);
        }
        if constexpr (kSettles) {
            if (i == 1) {  // the last strip has all its weights
                if (e.dtype != kFloat32) round_strip(e.dtype, kStrip, e.p + settled);
                now = masks.of(e.p + settled);
            }
            if (i >= 1) settle_part<kUsual>(e, settled, i - 1, masks, now, last, t);
            if (i == kVectors - 1) settle_part<kUsual>(e, settled, i, masks, now, last, t);
        }
    }
    if constexpr (kSteps) add(t, sums);
}

template <bool kUsual, class Masks>
void step_block(const AdamW& scalars, const AdamWCall& call, const Elements& on, const Masks& masks, Tally& tally) {
    Scalars s(scalars, call);  // copies, which no store can change
    if (kUsual) s.eps_inside = false;
    const Elements e = on;
    Tally t = tally;
    Known known[2];
    alignas(64) float denominators[kStrip];
    prefetch_strip(e, 0);
    step_strip<kUsual, true, false>(s, e, 0, masks, known[0], known[1], denominators, t);
    int at = kStrip, turn = 1;
    for (; at < e.count; at += kStrip, turn ^= 1) {
        prefetch_strip(e, at);
        step_strip<kUsual, true, true>(s, e, at, masks, known[turn], known[turn ^ 1], denominators, t);
    }
    step_strip<kUsual, false, true>(s, e, at, masks, known[turn], known[turn ^ 1], denominators, t);
    tally = t;
}

inline void step_block(const AdamW& scalars, const AdamWCall& call, const Elements& e, const ByGroup& masks, Tally& t) {
    const Scalars s(scalars, call);
    uint64_t before[kBlock / kStrip], now[kBlock / kStrip];
    masks(e.p, e.count, before);
    for (int strip = 0; strip < e.count; strip += kStrip) {
        const Chosen keep = Chosen::of(before[strip / kStrip]), valid = e.valid(strip / kStrip);
        Sums sums;
        for (int i = 0; i < kVectors; ++i) {
            const int at = strip + i * Floats::width;
            step_moments<false, true>(s, e, at, keep.at[i], valid.at[i], sums, t);
            step_weights<false>(s, e, at, denominator<false>(s, e, at), valid.at[i], t);
        }
        add(t, sums);
        if (e.dtype != kFloat32) round_strip(e.dtype, kStrip, e.p + strip);
    }
    masks(e.p, e.count, now);
    for (int strip = 0; strip < e.count; strip += kStrip) {
        const Chosen old = Chosen::of(before[strip / kStrip]), keep = Chosen::of(now[strip / kStrip]);
        const Chosen valid = e.valid(strip / kStrip);
        for (int i = 0; i < kVectors; ++i) {
            settle<false, true>(Floats::load(e.p + (strip + i * Floats::width)), old.at[i], keep.at[i], valid.at[i], t);
        }
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
