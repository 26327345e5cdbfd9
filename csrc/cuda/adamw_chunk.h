// A few elements of one param in the registers of a thread: read, stepped, written.
//
// dtypes are known at run time only and are the same for a whole block. What is read stays as it lies in memory until
// everything has been asked for, so that all reads of a chunk are on their way at once.
#pragma once

#include "../core/dispatch.h"
#include "../core/philox.h"
#include "adamw_stats.h"
#include "memory.h"

namespace nm::cuda {

// The param that a block works on, in shared memory.
struct AdamWCurrent {
    AdamWParam param;
    AdamW scalars;
    int64_t gradient;  // its address

    NM_DEVICE int64_t address(AdamWTensor which) const { return which == kGradient ? gradient : param.address[which]; }
};

// Where a chunk lies: K columns of a row, of which `count` exist. Of flat params all K do, or none, at addresses for wide accesses.
struct Place {
    int64_t row, col;
    int count;
    bool wide;  // all exist, at addresses that fit
};

// K elements as they lie in memory: a word each, or two in a word where they are of 16 bits.
template <int K>
struct Raw {
    uint32_t word[K];
};

template <int K>
struct Floats {
    float at[K];
};

// The elements of a param's tensors: all in one row without gaps where kFlat.
template <bool kFlat>
struct Walk {
    template <class T>
    static NM_DEVICE T* at(const AdamWCurrent& c, AdamWTensor which, const Place& place) {
        T* const first = reinterpret_cast<T*>(c.address(which));
        return kFlat ? first + place.col : first + (place.row * c.param.stride[which][0] + place.col * c.param.stride[which][1]);
    }

    template <class T, int K>
    static NM_DEVICE void load_as(const AdamWCurrent& c, AdamWTensor which, const Place& place, Raw<K>& raw) {
        const T* from = at<T>(c, which, place);
        T x[K];
        if (kFlat ? place.count > 0 : place.wide) {
            load_streamed<K>(from, x);
        } else {
            const int64_t step = kFlat ? 1 : c.param.stride[which][1];
            NM_UNROLL
            for (int i = 0; i < K; ++i) x[i] = !kFlat && i < place.count ? from[i * step] : T(0);
        }
        memcpy(raw.word, x, sizeof x);
    }

    template <class T, int K>
    static NM_DEVICE void store_as(const AdamWCurrent& c, AdamWTensor which, const Place& place, const Raw<K>& raw) {
        T* to = at<T>(c, which, place);
        T x[K];
        memcpy(x, raw.word, sizeof x);
        if (kFlat || place.wide) {
            store_global<K>(to, x);
        } else {
            const int64_t step = c.param.stride[which][1];
            NM_UNROLL
            for (int i = 0; i < K; ++i) {
                if (i < place.count) to[i * step] = x[i];
            }
        }
    }

    template <int K>
    static NM_DEVICE Raw<K> load(const AdamWCurrent& c, AdamWTensor which, int dtype, const Place& place) {
        Raw<K> raw;
        if (dtype == kFloat32) {
            load_as<uint32_t>(c, which, place, raw);
        } else {
            load_as<uint16_t>(c, which, place, raw);
        }
        return raw;
    }

    // Of a place where some elements are.
    template <int K>
    static NM_DEVICE void store(const AdamWCurrent& c, AdamWTensor which, int dtype, const Place& place, const Raw<K>& raw) {
        if (dtype == kFloat32) {
            store_as<uint32_t>(c, which, place, raw);
        } else {
            store_as<uint16_t>(c, which, place, raw);
        }
    }
};

template <class T, int K>
NM_DEVICE Floats<K> widened_as(const Raw<K>& raw) {
    T x[K];
    Floats<K> result;
    memcpy(x, raw.word, sizeof x);
    NM_UNROLL
    for (int i = 0; i < K; ++i) result.at[i] = to_float(x[i]);
    return result;
}

template <class T, int K>
NM_DEVICE Raw<K> narrowed_to(const Floats<K>& from) {
    T x[K];
    Raw<K> raw;
    NM_UNROLL
    for (int i = 0; i < K; ++i) x[i] = from_float<T>(from.at[i]);
    memcpy(raw.word, x, sizeof x);
    return raw;
}

template <int K>
NM_DEVICE Floats<K> widened(const Raw<K>& raw, int dtype) {
    if (dtype == kFloat32) return widened_as<float>(raw);
    if (dtype == kBFloat16) return widened_as<bf16>(raw);
    return widened_as<fp16>(raw);
}

template <int K>
NM_DEVICE Raw<K> narrowed(const Floats<K>& from, int dtype) {
    if (dtype == kFloat32) return narrowed_to<float>(from);
    if (dtype == kBFloat16) return narrowed_to<bf16>(from);
    return narrowed_to<fp16>(from);
}

// Everything of K elements. After the step: the new weights, not yet rounded to their dtype, and the new states.
template <int K>
struct Elements {
    Floats<K> p, g, m, v, top{};
};

// Of the states' dtype: float or bf16.
template <class S>
constexpr int kDtypeOf = sizeof(S) == 4 ? kFloat32 : kBFloat16;

template <bool kFlat, class S, int K>
NM_DEVICE void load_elements(const AdamWCurrent& c, const AdamWOptions& o, const Place& place, Elements<K>& e) {
    const Raw<K> p = Walk<kFlat>::template load<K>(c, kWeight, c.param.dtype(kWeight), place);
    const Raw<K> g = Walk<kFlat>::template load<K>(c, kGradient, c.param.dtype(kGradient), place);
    const Raw<K> m = Walk<kFlat>::template load<K>(c, kFirst, kDtypeOf<S>, place);
    const Raw<K> v = Walk<kFlat>::template load<K>(c, o.frozen && o.top ? kTop : kSecond, kDtypeOf<S>, place);
    Raw<K> top{};
    if (o.top && !o.frozen) top = Walk<kFlat>::template load<K>(c, kTop, kDtypeOf<S>, place);
    e.p = widened(p, c.param.dtype(kWeight));
    e.g = widened(g, c.param.dtype(kGradient));
    e.m = widened_as<S>(m);
    e.v = widened_as<S>(v);
    if (o.top && !o.frozen) e.top = widened_as<S>(top);
}

// The held mask of a chunk of a row, of which four bits are half a byte.
NM_DEVICE void load_mask(const AdamWParam& param, const Place& place, bool* keep) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(param.mask) + (place.row * ((param.cols + 7) >> 3) + (place.col >> 3));
    const uint32_t bits = place.count > 0 ? uint32_t(*bytes) >> (place.col & 4) : 0u;
    NM_UNROLL
    for (int i = 0; i < 4; ++i) keep[i] = bits >> i & 1u;
}

// Steps K elements (the equations of core/adamw.h) and counts their statistics; `before` is their mask where kMasked.
template <bool kMasked, bool kHeld, int K>
NM_DEVICE void step_elements(const AdamW& scalars, const AdamWOptions& o, const bool* before, int count, Elements<K>& e, Tally& t) {
    AdamW s = scalars;
    s.eps_inside = o.eps_inside;  // an argument of the kernel: a branch that the compiler knows to be uniform
    float terms[K];
    if (o.scale) {
        const float scale = *o.scale;
        NM_UNROLL
        for (int i = 0; i < K; ++i) e.g.at[i] = e.g.at[i] / scale;
    }
    if (o.maximize) {
        NM_UNROLL
        for (int i = 0; i < K; ++i) e.g.at[i] = -e.g.at[i];
    }
    if constexpr (kHeld) {
        if (o.fixed) {
            s.decay = 0.0f;
            NM_UNROLL
            for (int i = 0; i < K; ++i) e.g.at[i] = before[i] ? e.g.at[i] : 0.0f;
        }
    }
    if constexpr (kMasked) {
        NM_UNROLL
        for (int i = 0; i < K; ++i) terms[i] = before[i] ? 0.0f : magnitude(e.p.at[i]);
        add_terms<K>(t.weight, terms);
        NM_UNROLL
        for (int i = 0; i < K; ++i) terms[i] = before[i] ? 0.0f : magnitude(e.g.at[i]);
        add_terms<K>(t.grad, terms);
        if (s.decay != 0.0f) {
            NM_UNROLL
            for (int i = 0; i < K; ++i) e.g.at[i] = before[i] ? e.g.at[i] : e.g.at[i] + (s.decay * e.p.at[i]);
        }
    }
    NM_UNROLL
    for (int i = 0; i < K; ++i) e.m.at[i] = adamw_first(s, e.m.at[i], e.g.at[i]);
    Floats<K> divisor = e.v;
    if (!o.frozen) {
        NM_UNROLL
        for (int i = 0; i < K; ++i) {
            const float old = e.v.at[i];
            e.v.at[i] = adamw_second(s, old, e.g.at[i]);
            terms[i] = i < count ? magnitude(e.v.at[i] - old) : 0.0f;
            t.unchanged += o.geometric && i < count && e.v.at[i] == old;
        }
        add_terms<K>(t.change, terms);
        if (o.geometric) {
            NM_UNROLL
            for (int i = 0; i < K; ++i) terms[i] = i < count ? terms[i] : 1.0f;
            multiply_terms<K>(t.log_change, terms);
        }
        divisor = e.v;
        if (o.top) {
            NM_UNROLL
            for (int i = 0; i < K; ++i) e.top.at[i] = larger(e.top.at[i], e.v.at[i]);
            divisor = e.top;
        }
    }
    NM_UNROLL
    for (int i = 0; i < K; ++i) {
        float u = adamw_update(s, e.m.at[i], divisor.at[i]);
        t.largest = max(t.largest, i < count ? float_bits(magnitude(u)) : 0u);
        if (s.clamp != 0.0f) u = clamped(u, s.clamp);
        e.p.at[i] = adamw_apply(s, e.p.at[i], u);
        if constexpr (kHeld) e.p.at[i] = o.fixed && !before[i] ? 0.0f : e.p.at[i];
    }
}

// Rounds states to bf16 by the random words of their elements (core/adamw.h); to_float(bf16) then gives them as they are.
template <bool kFlat, int K>
NM_DEVICE void round_stochastically(const AdamWCurrent& c, const AdamWOptions& o, const Place& place, Elements<K>& e) {
    const uint64_t first = uint64_t(place.row * c.param.cols + place.col), offset = adamw_stream(c.scalars.t, c.param.index);
    uint32_t word[8] = {};
    Words block = philox_block(o.seed, offset, first >> 2);
    NM_UNROLL
    for (int i = 0; i < 4; ++i) word[i] = block.w[i];
    if constexpr (!kFlat) {  // a row may begin with any word of a block; by an index they would go to local memory
        if (K > 1 && (first & 3)) {
            block = philox_block(o.seed, offset, (first >> 2) + 1);
            NM_UNROLL
            for (int i = 0; i < 4; ++i) word[i + 4] = block.w[i];
        }
        NM_UNROLL
        for (int i = 0; i < 7; ++i) word[i] = first & 1 ? word[i + 1] : word[i];
        NM_UNROLL
        for (int i = 0; i < 6; ++i) word[i] = first & 2 ? word[i + 2] : word[i];
    }
    NM_UNROLL
    for (int i = 0; i < K; ++i) {
        e.m.at[i] = rounded_by(e.m.at[i], word[i] & 0xffffu);
        e.v.at[i] = rounded_by(e.v.at[i], word[i] >> 16);
    }
}

// Rounds the weights and the states to their dtypes and writes them.
template <bool kFlat, class S, int K>
NM_DEVICE void store_elements(const AdamWCurrent& c, const AdamWOptions& o, const Place& place, Elements<K>& e) {
    const int dtype = c.param.dtype(kWeight);
    const Raw<K> p = narrowed(e.p, dtype);
    Walk<kFlat>::store(c, kWeight, dtype, place, p);
    e.p = widened(p, dtype);
    if constexpr (sizeof(S) == 2) {
        if (o.stochastic) round_stochastically<kFlat>(c, o, place, e);
    }
    Walk<kFlat>::store(c, kFirst, kDtypeOf<S>, place, narrowed_to<S>(e.m));
    if (!o.frozen) {
        Walk<kFlat>::store(c, kSecond, kDtypeOf<S>, place, narrowed_to<S>(e.v));
        if (o.top) Walk<kFlat>::store(c, kTop, kDtypeOf<S>, place, narrowed_to<S>(e.top));
    }
}

// Counts what depends on the mask after the step.
template <bool kMasked, bool kHeld, int K>
NM_DEVICE void settle_elements(const bool* before, const bool* after, int count, const Elements<K>& e, Tally& t) {
    NM_UNROLL
    for (int i = 0; i < K; ++i) {
        if constexpr (kMasked && !kHeld) t.flips += before[i] != after[i];
        t.non_zeros += e.p.at[i] != 0.0f && (!kMasked || after[i]) && ((kMasked && !kHeld) || i < count);
    }
}

}  // namespace nm::cuda
