// MaskedAdamW on a block: up to kBlock elements that lie one after another in memory, in whole strips of 64 (the last
// filled up with zeros, which take no part). Three short passes, so that all but the first touch of p finds it in L1:
//
//   masks before   one 64-bit word per strip;  step   the equations of core/adamw.h and their sums, in registers
//   masks after    and what depends on them: flips, non-zeros, the masked weight
#pragma once

#include <cmath>

#include "../../core/adamw.h"
#include "../kernels.h"
#include "select.h"

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
constexpr int kAhead = 512;

// The masks of a call; m = 0 where it has none.
struct Masker {
    int n = 0, m = 0;
    KeepFn<float> fast = nullptr;  // null where strips are not whole groups

    explicit operator bool() const { return m != 0; }

    void operator()(const float* w, int count, uint64_t* keep) const {
        if (fast) {
            for (int i = 0; i < count; i += kStrip) keep[i / kStrip] = fast(w + i, n, m);
        } else {
            by_group(w, count, keep);
        }
    }

  private:
    void by_group(const float* w, int count, uint64_t* keep) const {
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

// What a block works on. `to` receives the new weight and may be p; `top` is null without amsgrad.
struct Elements {
    int count;
    const float *p, *g;
    float *m, *v, *top, *to;

    uint64_t valid(int strip) const {
        const int left = count - strip * kStrip;
        return left >= kStrip ? ~uint64_t(0) : (uint64_t(1) << left) - 1;
    }
};

// Running statistics of a tile. Eight fp64 lanes each, which `total` adds up in a fixed order.
struct Tally {
    Doubles change, pruned_weight, pruned_grad;
    Product log_change;
    Floats highest{0.0f};
    int64_t unchanged = 0, flips = 0, non_zeros = 0;
    int64_t factors = 0;  // in log_change, all lanes together
};

inline double total(const double* lane) { return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7])); }

inline double total(const Doubles& sum) {
    double lane[8];
    sum.store(lane);
    return total(lane);
}

inline void sum(Doubles& to, Floats x) {
    by_eight(x, [&](Doubles eight) { add(to, eight); });
}

template <bool kMasked>
void step(const AdamW& scalars, const AdamWCall& call, const Elements& on, const uint64_t* keep, Tally& tally) {
    constexpr uint32_t all = (uint32_t(1) << Floats::width) - 1;
    constexpr double smallest = 0x1p-149;  // the smallest fp32 denormal
    const AdamW s = scalars;               // copies, which no store can change
    const Elements e = on;
    Tally t = tally;
    for (int i = 0; i < e.count; i += Floats::width) {
        const uint32_t valid = e.count - i >= Floats::width ? all : (uint32_t(1) << (e.count - i)) - 1;
        for (const float* from : {e.p, e.g, static_cast<const float*>(e.m), static_cast<const float*>(e.v)}) __builtin_prefetch(from + i + kAhead);
        const Floats p = Floats::load(e.p + i);
        Floats g = Floats::load(e.g + i);
        if (call.grad_scale) g = g / Floats(*call.grad_scale);
        if (s.maximize) g = -g;
        if (kMasked) {
            const uint32_t pruned = ~uint32_t(keep[i / kStrip] >> (i % kStrip)) & valid;
            sum(t.pruned_weight, kept(pruned, magnitude(p)));
            sum(t.pruned_grad, kept(pruned, magnitude(g)));
            if (s.decay != 0.0f) g = choose(pruned, g + (Floats(s.decay) * p), g);
        }
        const Floats m = adamw_first(s, Floats::load(e.m + i), g);
        m.store(e.m + i);
        Floats v = Floats::load(e.v + i);
        if (!s.frozen) {
            const Floats old = v;
            v = adamw_second(s, old, g);
            v.store(e.v + i);
            const Floats change = kept(valid, magnitude(v - old));
            sum(t.change, change);
            if (call.geometric) {
                by_eight(choose(valid, change, Floats(1.0f)), [&](Doubles eight) { t.log_change.times(eight, smallest); });
                t.factors += Floats::width;
                t.unchanged += __builtin_popcount(equal(v, old) & valid);
            }
            if (e.top) {
                v = larger(Floats::load(e.top + i), v);
                v.store(e.top + i);
            }
        }
        Floats u = kept(valid, adamw_update(s, m, v));
        t.highest = higher(t.highest, magnitude(u));
        if (s.clamp != 0.0f) u = clamped(u, Floats(s.clamp));
        adamw_apply(s, p, u).store(e.to + i);
    }
    tally = t;
}

inline uint64_t non_zeros(const float* w) {
    uint64_t zeros = 0;
    for (int i = 0; i < kStrip; i += Floats::width) zeros |= uint64_t(equal(Floats::load(w + i), Floats(0.0f))) << i;
    return ~zeros;
}

// out = w where the mask keeps it, +0.0 elsewhere
inline void prune_strip(const float* w, uint64_t keep, float* out) {
    for (int i = 0; i < kStrip; i += Floats::width) kept(uint32_t(keep >> i), Floats::load(w + i)).store(out + i);
}

}  // namespace
}  // namespace nm
