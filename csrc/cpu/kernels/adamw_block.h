// MaskedAdamW on a block: up to kBlock elements that lie one after another in memory, in whole strips of 64 (the last
// padded with zeros, which do not count). All of it happens to a strip while it is in the first-level cache:
//
//   mask before   step: the equations of core/adamw.h and their sums   mask after   settle: flips, non-zeros
//
// Where groups do not end with strips, masks are taken of whole blocks, before all steps and after them.
#pragma once

#include <cmath>
#include <type_traits>

#include "../kernels.h"
#include "select.h"

#include "../../core/adamw.h"  // after simd.h, whose root() it takes

namespace nm {
namespace {

constexpr int kStrip = 64;
constexpr int kBlock = 256;  // also the largest group

// How many elements ahead the step asks for memory. AMD EPYC (Zen 5), 2 threads, 4096 x 11008, 2026-11-21: 1.13 times the
// time of the bare memory traffic without, 1.07 with 256 or 512, 1.10 with 1024.
constexpr int kStepAhead = 512;

// A strip's sums add up in fp32, each term times kScale in the same rounding: 64 of the largest do not overflow.
constexpr float kScale = 0x1p-8f;

constexpr int kVectors = kStrip / kLanes;
constexpr int kPart = 16;                      // elements of a strip that take a step together, under every instruction set
constexpr int kPartVectors = kPart / kLanes;
constexpr int kSumVectors = 8 / kLongs;        // of eight fp64 lanes: element i of a run goes to lane i mod 8

// Which elements of a part of a strip, and of a whole one.
struct PartFlags {
    Flags at[kPartVectors];
};

struct StripFlags {
    Flags at[kVectors];

    NM_INLINE PartFlags part(int i) const {
        PartFlags r;
        each<kPartVectors>([&](auto k) { r.at[k] = at[i * kPartVectors + k]; });
        return r;
    }
    NM_INLINE static StripFlags of(uint64_t bits) {
        StripFlags c;
        each<kVectors>([&](auto i) { c.at[i] = flags_of(bits >> (i * kLanes)); });
        return c;
    }
    NM_INLINE static StripFlags of(const Kept64<float>& kept) {
        StripFlags c;
        each<kVectors>([&](auto i) { c.at[i] = kept.at(i); });
        return c;
    }
};

// What a block works on. `dtype` is what new weights are rounded to; `top` is null without amsgrad, `bits` without held masks.
struct Elements {
    int count, dtype;
    float *p, *m, *v, *top;
    const float* g;
    const uint64_t* bits;  // of each strip

    bool whole(int strip) const { return count - strip * kStrip >= kStrip; }
    NM_INLINE StripFlags valid(int strip) const {
        return StripFlags::of(whole(strip) ? ~uint64_t(0) : (uint64_t(1) << (count - strip * kStrip)) - 1);
    }
};

// The masks of a call: `of` takes the elements and the first one of a strip, `at` its result, the number of a part and the part's address.
struct Unmasked {
    static constexpr bool masked = false;
    struct Kept {};
    NM_INLINE Kept of(const Elements&, int) const { return {}; }
    NM_INLINE PartFlags at(const Kept&, int, const float*) const { return {}; }
};

// Masks that the call brings.
struct Held {
    static constexpr bool masked = true;
    using Kept = StripFlags;
    NM_INLINE Kept of(const Elements& e, int strip) const { return StripFlags::of(e.bits[strip / kStrip]); }
    NM_INLINE PartFlags at(const Kept& kept, int part, const float*) const { return kept.part(part); }
};

struct TwoOfFour {
    static constexpr bool masked = true;
    struct Kept {};
    NM_INLINE Kept of(const Elements&, int) const { return {}; }
    NM_INLINE PartFlags at(const Kept&, int, const float* w) const {
        decltype(keys_of(Floats{})) keys[kPartVectors];
        KeyMarks dropped[kPartVectors];
        each<kPartVectors>([&](auto i) { keys[i] = keys_of(load(w + i * kLanes)); });
        not_two_of_four(keys, dropped);
        PartFlags kept;
        each<kPartVectors>([&](auto i) { kept.at[i] = opposite(Flags(dropped[i])); });
        return kept;
    }
};

template <int N, int M>
struct FixedMasks {
    static constexpr bool masked = true;
    using Kept = StripFlags;
    NM_INLINE Kept of(const Elements& e, int strip) const { return StripFlags::of(keep64<float, N, M>(e.p + strip)); }
    NM_INLINE PartFlags at(const Kept& kept, int part, const float*) const { return kept.part(part); }
};

struct AnyPattern {
    static constexpr bool masked = true;
    using Kept = StripFlags;
    int n, m;
    KeepFn<float>* keep;
    NM_INLINE Kept of(const Elements& e, int strip) const { return StripFlags::of(keep(e.p + strip, n, m)); }
    NM_INLINE PartFlags at(const Kept& kept, int part, const float*) const { return kept.part(part); }
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

// f(the masks of a call), the common patterns specialised; n = m = 0: none, or held ones. Not for the few x86-64 processors without AVX2: compiling
// that took a minute, and ten with the address sanitizer.
template <class F>
void with_masks(int n, int m, bool held, const F& f) {
    if (held) return f(Held{});
    if (m == 0) return f(Unmasked{});
    if (n == 2 && m == 4) return f(TwoOfFour{});
#if defined(__AVX2__) || !defined(__x86_64__)
    if (n == 1 && m == 4) return f(FixedMasks<1, 4>{});
    if (n == 2 && m == 8) return f(FixedMasks<2, 8>{});
    if (n == 1 && m == 8) return f(FixedMasks<1, 8>{});
    if (n == 4 && m == 8) return f(FixedMasks<4, 8>{});
    if (n == 1 && m == 16) return f(FixedMasks<1, 16>{});
    if (n == 1 && m == 32) return f(FixedMasks<1, 32>{});
#endif
    if (const KeepFn<float>* keep = keep_fn<float>(n, m)) return f(AnyPattern{n, m, keep});
    f(ByGroup{n, m});
}

// The logarithm of a product: the mantissas' product, and the sum of the exponents.
struct LogProduct {
    Doubles mantissas[kSumVectors];
    Longs exponents[kSumVectors] = {};

    LogProduct() {
        for (Doubles& one : mantissas) one = 1.0 - Doubles{};
    }

    // times max(a, smallest), a not negative, of the `half`-th half of a register
    NM_INLINE void times(int half, Doubles a, double smallest) {
        constexpr uint64_t kMantissa = (uint64_t(1) << 52) - 1, kOne = uint64_t(1023) << 52;
        const Longs bits = reinterpret_cast<Longs>(maximum(a, smallest - Doubles{}));
        exponents[half % kSumVectors] += bits >> 52;
        mantissas[half % kSumVectors] *= reinterpret_cast<Doubles>((bits & kMantissa) | kOne);
    }
};

// Running statistics of a tile. Sums have eight fp64 lanes, which `total` adds up in a fixed order, and are times kScale.
struct Tally {
    Doubles change[kSumVectors] = {}, pruned_weight[kSumVectors] = {}, pruned_grad[kSumVectors] = {};
    LogProduct log_change;
    Floats highest = {};
    Uints unchanged = {}, flips = {}, non_zeros = {};
    int64_t factors = 0;  // in log_change, all lanes together
};

// The same of a strip's sums.
struct StripSums {
    Floats change[kPartVectors] = {}, pruned_weight[kPartVectors] = {}, pruned_grad[kPartVectors] = {};
};

inline double total(const double* lane) { return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7])); }

inline double total(const Doubles* sum) {
    double lane[8];
    std::memcpy(lane, sum, sizeof lane);
    return total(lane);
}

// How many flags were set.
inline int64_t total(Uints count) {
    int64_t sum = 0;
    for (int l = 0; l < kLanes; ++l) sum += count[l];
    return sum;
}

NM_INLINE void times_logarithm(Tally& t, int i, Floats change, Flags valid) {
    constexpr double smallest = 0x1p-149;  // the smallest fp32 denormal
    const Floats factors = choose(valid, change, splat(1.0f));
    t.log_change.times(2 * i, lower_half(factors), smallest);
    t.log_change.times(2 * i + 1, upper_half(factors), smallest);
    t.factors += kLanes;
}

// `count` is kStrip. A compiler that knows this warns of a remainder, which does not exist.
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
    Floats b1, omb1, b2, omb2, ibc1, bc2, sbc2, eps, wdf, lr, decay, clamp;
    bool frozen, eps_inside, maximize, decays, clamps, geometric, fixed;
    const float* grad_scale;

    Scalars(const AdamW& s, const AdamWCall& call)
        : b1(splat(s.b1)), omb1(splat(s.omb1)), b2(splat(s.b2)), omb2(splat(s.omb2)), ibc1(splat(s.ibc1)), bc2(splat(s.bc2)),
          sbc2(splat(s.sbc2)), eps(splat(s.eps)), wdf(splat(s.wdf)), lr(splat(s.lr)), decay(splat(s.decay)), clamp(splat(s.clamp)),
          frozen(s.frozen), eps_inside(s.eps_inside), maximize(s.maximize), decays(s.decay != 0.0f && !call.fixed),
          clamps(s.clamp != 0.0f), geometric(call.geometric), fixed(call.fixed), grad_scale(call.grad_scale) {}
};

// Adds kScale times the terms, rounded once.
NM_INLINE void include(Floats& sum, Floats terms) {
#if defined(__AVX2__)
    sum = fused(terms, splat(kScale), sum);
#else
    // of a product with a power of two fp64 has more than twice the bits: its own rounding changes nothing
    for (int l = 0; l < kLanes; ++l) sum[l] = float(double(sum[l]) + double(kScale) * double(terms[l]));
#endif
}

// A step of one register, the i-th of its part; `at` is where it lies. First the gradient as the step takes it; `keep` is the mask
// of the weights before it.
template <bool kUsual, bool kMasked, bool kHeld>
NM_INLINE Floats take_gradient(const Scalars& s, const Elements& e, int at, int i, Flags keep, Flags valid, StripSums& sums) {
    const Floats p = load(e.p + at);
    Floats g = load(e.g + at);
    if (!kUsual && s.grad_scale) g = g / splat(*s.grad_scale);
    if (!kUsual && s.maximize) g = -g;
    if (kHeld && s.fixed) g = only_where(keep, g);
    if constexpr (kMasked) {
        const Floats size = magnitude(g);
        include(sums.pruned_weight[i], only_where_not(keep, magnitude(p)));
        include(sums.pruned_grad[i], only_where_not(keep, kUsual ? size : only_where(valid, size)));
        if (s.decays) g = choose(keep, g, g + (s.decay * p));
    }
    return g;
}

// v, and the largest that it was.
template <bool kUsual>
NM_INLINE void second_moment(const Scalars& s, const Elements& e, int at, int i, Floats g, Flags valid, StripSums& sums, Tally& t) {
    if (!kUsual && s.frozen) return;
    const Floats old = load(e.v + at), v = adamw_second(s, old, g);
    store(e.v + at, v);
    Floats change = magnitude(v - old);
    if constexpr (!kUsual) {
        change = only_where(valid, change);
        if (s.geometric) {
            t.unchanged = one_more(both(equal(v, old), valid), t.unchanged);
            times_logarithm(t, i, change, valid);
        }
        if (e.top) {  // the larger, or a NaN of either
            const Floats top = load(e.top + at);
            store(e.top + at, choose(either(below(v, top), unequal(top, top)), top, v));
        }
    }
    include(sums.change[i], change);
}

template <bool kUsual, bool kMasked, bool kHeld>
NM_INLINE void step_moments(const Scalars& s, const Elements& e, int at, int i, Flags keep, Flags valid, StripSums& sums, Tally& t) {
    const Floats g = take_gradient<kUsual, kMasked, kHeld>(s, e, at, i, keep, valid, sums);
    second_moment<kUsual>(s, e, at, i, g, valid, sums, t);
    store(e.m + at, adamw_first(s, load(e.m + at), g));
}

template <bool kUsual>
NM_INLINE Floats denominator(const Scalars& s, const Elements& e, int at) {
    return adamw_denominator(s, load((kUsual || !e.top ? e.v : e.top) + at));
}

template <bool kUsual, bool kHeld>
NM_INLINE void step_weights(const Scalars& s, const Elements& e, int at, Floats denominator, Flags keep, Flags valid, Tally& t) {
    Floats u = adamw_quotient(s, load(e.m + at), denominator);
    if (!kUsual) u = only_where(valid, u);
    t.highest = larger_magnitude(t.highest, magnitude(u));
    if (!kUsual && s.clamps) u = minimum(s.clamp, maximum(-s.clamp, u));  // NaN stays
    const Floats p = adamw_apply(s, load(e.p + at), u);
    store(e.p + at, kHeld && s.fixed ? only_where(keep, p) : p);
}

// Counts what depends on the new mask: the flips, and the non-zeros that it keeps.
template <bool kUsual, bool kMasked>
NM_INLINE void settle(Floats w, Flags before, Flags now, Flags valid, Tally& t) {
    if constexpr (kMasked) {
        const Flags flips = differing(before, now);
        t.flips = one_more(kUsual ? flips : both(flips, valid), t.flips);
    }
    Flags full = unequal(w, Floats{});
    if (kMasked) full = both(full, now);
    t.non_zeros = one_more(kUsual ? full : both(full, valid), t.non_zeros);
}

// Elements i and i + 8 of a part are added in fp32, to lane i.
NM_INLINE void add(Doubles* sum, const Floats* terms) {
#if defined(__AVX512F__)
    sum[0] += lower_half(terms[0] + Floats(exchange<32>(Register(terms[0]))));
#else
    each<kPartVectors / 2>([&](auto i) {
        const Floats both = terms[i] + terms[i + kPartVectors / 2];
        sum[2 * i] += lower_half(both);
        sum[2 * i + 1] += upper_half(both);
    });
#endif
}

NM_INLINE void add(Tally& t, const StripSums& sums) {
    add(t.change, sums.change);
    add(t.pruned_weight, sums.pruned_weight);
    add(t.pruned_grad, sums.pruned_grad);
}

// What is known of a strip: its mask before the step, and which of it are elements.
struct Known {
    StripFlags before, valid;
};

// The way of an element from its first mask through root and divisions to its last is longer than a processor looks ahead. So
// parts at different stages, which do not wait for each other, take turns: the moments of one part, the denominator of the part
// before, the weights of the one before that, and the new mask of a part of the last strip.
template <bool kUsual, bool kSteps, bool kSettles, class Masks>
NM_INLINE void step_strip(const Scalars& s, const Elements& e, int strip, const Masks& masks, Known& mine, const Known& last,
                          float* denominators, Tally& t) {
    constexpr int kParts = kStrip / kPart;
    constexpr bool kHeld = std::is_same_v<Masks, Held>;
    const int settled = strip - kStrip;
    typename Masks::Kept old, now;
    StripSums sums;
    if constexpr (kSteps) old = masks.of(e, strip);
    if constexpr (kSteps && !kUsual) mine.valid = e.valid(strip / kStrip);
    const auto settle_part = [&](int part) __attribute__((always_inline)) {
        const float* from = e.p + (settled + part * kPart);
        PartFlags keep = {};
        if constexpr (Masks::masked) keep = masks.at(now, part, from);
        each<kPartVectors>([&](auto i) __attribute__((always_inline)) {
            const int one = part * kPartVectors + i;
            settle<kUsual, Masks::masked>(load(from + i * kLanes), last.before.at[one], keep.at[i], last.valid.at[one], t);
        });
    };
    each<kParts>([&](auto part) __attribute__((always_inline)) {
        constexpr int kNow = part, kOne = (part + kParts - 1) % kParts, kTwo = (part + kParts - 2) % kParts;
        if constexpr (kSteps) {
            PartFlags before = {};
            if constexpr (Masks::masked) before = masks.at(old, kNow, e.p + (strip + kNow * kPart));
            each<kPartVectors>([&](auto i) __attribute__((always_inline)) {
                constexpr int one = kNow * kPartVectors + i;
                const Flags keep = mine.before.at[one] = before.at[i];
                step_moments<kUsual, Masks::masked, kHeld>(s, e, strip + one * kLanes, i, keep, mine.valid.at[one], sums, t);
            });
        }
        if constexpr (kNow >= 1 ? kSteps : kSettles) {
            each<kPartVectors>([&](auto i) __attribute__((always_inline)) {
                const int at = kOne * kPart + i * kLanes;
                store(denominators + at, denominator<kUsual>(s, e, (kNow >= 1 ? strip : settled) + at));
            });
        }
        if constexpr (kNow >= 2 ? kSteps : kSettles) {
            each<kPartVectors>([&](auto i) __attribute__((always_inline)) {
                const int at = kTwo * kPart + i * kLanes;
                const Known& known = kNow >= 2 ? mine : last;
                const Flags keep = known.before.at[kTwo * kPartVectors + i], valid = known.valid.at[kTwo * kPartVectors + i];
                step_weights<kUsual, kHeld>(s, e, (kNow >= 2 ? strip : settled) + at, load(denominators + at), keep, valid, t);
            });
        }
        if constexpr (kSettles) {
            if constexpr (kNow == 1) {  // the last strip has all its weights
                if (e.dtype != kFloat32) round_strip(e.dtype, kStrip, e.p + settled);
                now = masks.of(e, settled);
            }
            if constexpr (kNow >= 1) settle_part(kNow - 1);
            if constexpr (kNow == kParts - 1) settle_part(kNow);
        }
    });
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
        const StripFlags keep = StripFlags::of(before[strip / kStrip]), valid = e.valid(strip / kStrip);
        StripSums sums;
        for (int i = 0; i < kVectors; ++i) {
            const int at = strip + i * kLanes;
            step_moments<false, true, false>(s, e, at, i % kPartVectors, keep.at[i], valid.at[i], sums, t);
            step_weights<false, false>(s, e, at, denominator<false>(s, e, at), keep.at[i], valid.at[i], t);
        }
        add(t, sums);
        if (e.dtype != kFloat32) round_strip(e.dtype, kStrip, e.p + strip);
    }
    masks(e.p, e.count, now);
    for (int strip = 0; strip < e.count; strip += kStrip) {
        const StripFlags old = StripFlags::of(before[strip / kStrip]), keep = StripFlags::of(now[strip / kStrip]);
        const StripFlags valid = e.valid(strip / kStrip);
        for (int i = 0; i < kVectors; ++i) {
            settle<false, true>(load(e.p + (strip + i * kLanes)), old.at[i], keep.at[i], valid.at[i], t);
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
