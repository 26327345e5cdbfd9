// MVUE by level (core/mvue.h) for kLanes groups at once: x[i] is element i of every group.
//
// Groups whose level is 0 are copied: they have at most one element that differs from zero. A lane whose level is beyond the
// range of plain arithmetic is done again by the code for one group.
#pragma once

#include "../../core/bitpack.h"
#include "../../core/dispatch.h"
#include "../../core/mvue.h"
#include "simd/simd.h"

namespace nm {
namespace {

// Sum of Count magnitudes as a balanced tree, and the least sum without one of them.
struct TreeSums {
    Floats all, rest;
};

template <int Count>
NM_INLINE TreeSums sums_of(const Floats* a) {
    if constexpr (Count == 2) {
        return {a[0] + a[1], smaller_magnitude(a[0], a[1])};
    } else {
        const TreeSums left = sums_of<Count / 2>(a), right = sums_of<Count / 2>(a + Count / 2);
        return {left.all + right.all, smaller_magnitude(left.rest + right.all, left.all + right.rest)};
    }
}

template <class T>
NM_INLINE Floats rounded(Floats level, Uints word);

template <>
NM_INLINE Floats rounded<float>(Floats level, Uints) {
    return level;
}

template <>
NM_INLINE Floats rounded<bf16>(Floats level, Uints word) {
    return float_of((bits_of(level) + (word & 0xffffu)) & 0xffff0000u);
}

template <>
NM_INLINE Floats rounded<fp16>(Floats level, Uints word) {
    const Floats shift = only_where(below(level, splat(0x1p-14f)), splat(0x1p-14f));
    return float_of((bits_of(level + shift) + (word & 0x1fffu)) & 0xffffe000u) - shift;
}

// The kept elements of a group, in order of index.
template <int N>
struct Sampled {
    Floats value[N];
    Uints index[N];
};

// The lanes of `slow`, group by group.
template <class T, int N, int M>
__attribute__((noinline, cold)) void sample_slowly(const float* g, Uints word, unsigned slow, Sampled<N>& to) {
    for (; slow != 0; slow &= slow - 1) {
        const int l = __builtin_ctz(slow);
        Group<M> group;
        float x[M], values[M];
        uint8_t keep[M], indices[M];
        for (int i = 0; i < M; ++i) group.a[i] = nm::magnitude(g[i * kLanes + l]);
        group.template exact<T>(N, M, word[l]);
        for (int i = 0; i < M; ++i) {
            x[i] = group.result(i, g[i * kLanes + l]);
            keep[i] = x[i] != 0.0f;
        }
        compact_group(x, keep, N, M, values, indices);
        for (int k = 0; k < N; ++k) {
            to.value[k][l] = values[k];
            to.index[k][l] = indices[k];
        }
    }
}

template <class T, int N, int M>
NM_INLINE Sampled<N> sample(Fixed<N, M>, const float* g, Uints word) {
    Floats a[M];
    NM_UNROLL_16 for (int i = 0; i < M; ++i) a[i] = magnitude(load(g + i * kLanes));
    const TreeSums sums = sums_of<M>(a);
    Floats h = N == 1 ? sums.all : smaller_magnitude(sums.all * splat(0.5f), sums.rest);
    const Flags finite = below(sums.all, splat(kMostLevel)), plain = both(finite, at_least(h, splat(kLeastLevel)));
    const bool rare = !all(plain);
    Flags lone = none();
    if (rare) {
        // the sum is then the element itself; so small that sums above it are no fixed point, it is left to the slow way
        lone = both(zero(h), both(finite, either(zero(sums.all), at_least(sums.all, splat(kLeastLevel)))));
        h = choose(lone, sums.all, h);
    }
    const Floats level = float_of(bits_of(h) & ~7u), base = float_of((bits_of(level) & 0x7f800000u) + (3u << 23));
    const Uints mark = M < 16 ? ((word >> 9) & 0x7fff80u) | 0x3f800040u : ((word >> 9) & 0x7fff00u) | 0x3f800080u;
    Floats second = base + float_of(mark) * level, first = second - level, rise = rounded<T>(level, word);
    if (rare) {
        // the first element, and the one that differs from zero, or the next
        const Floats before = splat(-1.0f);
        first = choose(lone, before, first);
        if (N == 2) second = choose(lone, choose(zero(sums.all), before, base), second);
        rise = only_where_not(lone, rise);
    }
    Sampled<N> to;
    Floats found[N], c = base;
    for (int k = 0; k < N; ++k) found[k] = load(g + k * kLanes), to.index[k] = splat(uint32_t(k));
    NM_UNROLL_16 for (int i = 0; i < M - 1; ++i) {
        const Floats next = load(g + (i + 1) * kLanes);
        c = c + smaller_magnitude(a[i], level);
        const Flags one = at_least(first, c);
        found[0] = choose(one, next, found[0]);
        to.index[0] = one_more(one, to.index[0]);
        if (N == 2 && i > 0) {
            const Flags two = at_least(second, c);
            found[N - 1] = choose(two, next, found[N - 1]);
            to.index[N - 1] = one_more(two, to.index[N - 1]);
        }
    }
    // -0.0 becomes 0.0
    for (int k = 0; k < N; ++k) to.value[k] = with_sign(larger_magnitude(magnitude(found[k]), rise), found[k]) + splat(0.0f);
    if (rare) {
        const unsigned slow = kAllLanes & ~(lanes_of(plain) | lanes_of(lone));
        if (slow != 0) {
            Sampled<N> again = to;  // not `to`: what a call writes to stays in memory
            sample_slowly<T, N, M>(g, word, slow, again);
            to = again;
        }
    }
    return to;
}

// Element i of the estimate.
template <int N>
NM_INLINE Floats element(const Sampled<N>& from, int i) {
    const Floats one = only_where(equal(from.index[0], splat(uint32_t(i))), from.value[0]);
    return N == 1 ? one : either(one, only_where(equal(from.index[N - 1], splat(uint32_t(i))), from.value[N - 1]));
}

}  // namespace
}  // namespace nm
