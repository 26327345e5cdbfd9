// core/mvue.h for kLanes groups at once, each step of it for all of them: x[i] is element i of every group.
//
// Lanes that need no sampling are `done`: their open magnitudes are 0 and their sum 1, so that they never saturate and
// never draw. Cumulative probabilities are 32 bits: they stay below 256 * 2^24, and where adding 2^24 - u overflows, the
// comparison of upper bytes does not notice.
#pragma once

#include <algorithm>

#include "../../core/mvue.h"
#include "../../core/dispatch.h"
#include "simd/simd.h"

namespace nm {
namespace {

constexpr uint32_t kOne = 1u << 24;
constexpr float kScalable = 0x1p100f;  // times 2^25 it is still finite

// The balanced tree of tree_sum: the largest power of two below Count on the left.
template <int Count>
NM_INLINE Floats tree_of(const Floats* a) {
    if constexpr (Count == 1) {
        return a[0];
    } else {
        constexpr int left = 1 << (31 - __builtin_clz(Count - 1));
        return tree_of<left>(a) + tree_of<Count - left>(a + left);
    }
}

template <int N, int M>
NM_INLINE Floats tree(const Floats* a, Fixed<N, M>) {
    return tree_of<M>(a);
}

inline Floats tree(const Floats* a, Any p) {
    Floats t[kMaxM];
    t[0] = a[0];
    for (int i = 1; i < p.m; ++i) t[i] = a[i];
    for (int count = p.m; count > 1; count = (count + 1) / 2) {
        for (int i = 0; i < count / 2; ++i) t[i] = t[2 * i] + t[2 * i + 1];
        if (count & 1) t[count / 2] = t[count - 1];
    }
    return t[0];
}

// A batch of groups between its steps.
template <class P>
struct Batch {
    Floats open[P::capacity];  // magnitudes, 0 where the fate of the element is known
    Floats sum;                // of the open magnitudes
    Floats left;               // how many are still to be kept
    Flags done, lost;         // groups that are not sampled; of these, those that are not finite

    NM_INLINE void start(P p, const float* g) {
        Floats least = magnitude(load(g));
        open[0] = least;
        NM_UNROLL_8 for (int i = 1; i < p.m; ++i) {
            open[i] = magnitude(load(g + i * kLanes));
            least = smaller_magnitude(least, open[i]);
        }
        sum = tree(open, p);
        left = splat(float(p.n));
        const Floats infinity = splat(bits_float(0x7f800000u));
        done = lost = none();
        const Flags finite = below(sum, infinity);
        if (p.n == p.m || !all(both(finite, below(Floats{}, least)))) find_done(p, finite);
    }

    NM_INLINE void find_done(P p, Flags finite) {
        const Floats one = splat(1.0f), zero = splat(0.0f);
        Floats non_zeros = zero;
        NM_UNROLL_8 for (int i = 0; i < p.m; ++i) non_zeros = non_zeros + choose(nonzero(open[i]), one, zero);
        lost = without(at_least(zero, zero), finite);
        done = either(lost, at_least(splat(float(p.n)), non_zeros));
        NM_UNROLL_8 for (int i = 0; i < p.m; ++i) open[i] = choose(done, zero, open[i]);
        sum = choose(done, one, sum);
        left = choose(done, zero, left);
    }

    // after[i] is not 0 where something of a follows element i.
    static NM_INLINE void find_later(P p, const Floats* a, Floats* after) {
        after[p.m - 1] = Floats{};
        NM_UNROLL_8 for (int i = p.m - 2; i >= 0; --i) after[i] = either(after[i + 1], a[i + 1]);
    }

    // Keeps whatever has probability 1.
    NM_INLINE void saturate_once(P p) {
        const Floats each = left;
        NM_UNROLL_8 for (int i = 0; i < p.m; ++i) {
            const Flags full = at_least(open[i] * each, sum);
            open[i] = only_where_not(full, open[i]);
            left = left - only_where(full, splat(1.0f));
        }
        sum = choose(below(left, each), tree(open, p), sum);
    }

    // Until nothing has. Rounding keeps the order, so it is enough to look at the largest. In nearly every batch some group
    // changes in the first rounds but never in the n-th: the same number of rounds for all leaves nothing to mispredict.
    NM_INLINE void saturate(P p) {
        for (int round = 1; round < std::min(p.n, 4); ++round) saturate_once(p);
        for (;;) {
            Floats largest = open[0];
            NM_UNROLL_8 for (int i = 1; i < p.m; ++i) largest = larger_magnitude(largest, open[i]);
            if (__builtin_expect(!any(at_least(largest * left, sum)), 1)) return;
            saturate_once(p);
        }
    }

    NM_INLINE void exact(P p, const float* g, Uints word, Floats* x) {
        start(p, g);
        saturate(p);
        Floats later[P::capacity];
        find_later(p, open, later);
        const Uints total = truncated(left) << 24;
        const Uints shift = kOne - (word >> 8), end = total + shift;
        const Floats value = p.n <= 2 ? sum * inverse_power_of_two(left) : sum / left;
        Uints cumulative = Uints{}, before = shift >> 24;
        NM_UNROLL_8 for (int i = 0; i < p.m; ++i) {
            Uints after = end;
            if (i + 1 < p.m) {
                cumulative = smaller(cumulative + truncated(((open[i] * left) / sum) * splat(kTwo24)), total);
                after = choose(zero(later[i]), end, cumulative + shift);
            }
            const Uints whole = after >> 24;
            const Floats there = load(g + i * kLanes);
            x[i] = choose(equal(whole, before), only_where(zero(open[i]), there + splat(0.0f)), with_sign(value, there));
            before = whole;
        }
    }

    // The two draws of the papers, each with its own uniform.
    NM_INLINE void approx(P p, const float* g, Uints word0, Uints word1, Floats* x) {
        start(p, g);
        Floats rest[P::capacity], others[P::capacity];
        for (int j = 0; j < p.m; ++j) {
            for (int i = 0; i < p.m; ++i) others[i] = i == j ? Floats{} : open[i];
            rest[j] = tree(others, p);
        }
        Flags drawn[P::capacity];
        NM_UNROLL_8 for (int i = 0; i < p.m; ++i) x[i] = only_where(zero(open[i]), load(g + i * kLanes) + splat(0.0f));
        draw(p, open, sum, word0 >> 8, drawn);
        place(p, g, rest, drawn, x);
        Floats whole = Floats{};
        NM_UNROLL_8 for (int i = 0; i < p.m; ++i) {
            whole = choose(drawn[i], rest[i], whole);
            others[i] = choose(drawn[i], Floats{}, open[i]);
        }
        draw(p, others, whole, word1 >> 8, drawn);
        place(p, g, rest, drawn, x);
    }

    // The first element whose cumulative share of `whole` exceeds u; the last one that is not 0 gets what remains.
    NM_INLINE void draw(P p, const Floats* a, Floats whole, Uints u, Flags* drawn) {
        Floats later[P::capacity];
        find_later(p, a, later);
        Flags taken = none();
        Uints cumulative = Uints{};
        NM_UNROLL_8 for (int i = 0; i < p.m; ++i) {
            cumulative = smaller(cumulative + truncated((a[i] / whole) * splat(kTwo24)), splat(kOne));
            drawn[i] = without(below(u, choose(nonzero(later[i]), cumulative, splat(kOne))), taken);
            taken = either(taken, drawn[i]);
        }
    }

    // The drawn element, divided by the probability that one of the two draws takes it.
    NM_INLINE void place(P p, const float* g, const Floats* rest, const Flags* drawn, Floats* x) {
        Floats a = Floats{};
        NM_UNROLL_8 for (int i = 0; i < p.m; ++i) a = choose(drawn[i], open[i], a);
        Floats probability = a / sum;
        NM_UNROLL_8 for (int j = 0; j < p.m; ++j) {
            probability = choose(drawn[j], probability, probability + (a / rest[j]) * (open[j] / sum));
        }
        const Floats least = splat(1.0f / kTwo24), value = a / choose(below(probability, least), least, probability);
        NM_UNROLL_8 for (int i = 0; i < p.m; ++i) {
            x[i] = choose(without(drawn[i], done), with_sign(value, load(g + i * kLanes)), x[i]);
        }
    }
};

// Lanes whose sum is not finite become NaN where their mask keeps, by the code for one group: x is [m][kLanes].
template <class P>
__attribute__((noinline, cold)) void poison(P p, const float* g, unsigned lanes, float* x) {
    Group<P::capacity> one;
    for (; lanes != 0; lanes &= lanes - 1) {
        const int l = __builtin_ctz(lanes);
        for (int i = 0; i < p.m; ++i) one.a[i] = nm::magnitude(g[i * kLanes + l]);
        float sum;
        one.settle(p.n, p.m, sum);
        for (int i = 0; i < p.m; ++i) x[i * kLanes + l] = one.result(i, g[i * kLanes + l]);
    }
}

template <class P>
NM_INLINE void poison_lost(P p, const float* g, const Batch<P>& work, Floats* x) {
    if (!any(work.lost)) return;
    float t[P::capacity * kLanes];
    for (int i = 0; i < p.m; ++i) store(t + i * kLanes, x[i]);
    poison(p, g, lanes_of(work.lost), t);
    for (int i = 0; i < p.m; ++i) x[i] = load(t + i * kLanes);
}

template <class P>
NM_INLINE void approx(P p, const float* g, Uints word0, Uints word1, Floats* x) {
    Batch<P> work;
    work.approx(p, g, word0, word1, x);
    poison_lost(p, g, work, x);
}

template <class P>
__attribute__((noinline)) void exact_of_any(P p, const float* g, Uints word, Floats* x) {
    Batch<P> work;
    work.exact(p, g, word, x);
    poison_lost(p, g, work, x);
}

// The exact estimates of groups that are `plain` in every lane: no zeros, a sum that scaling cannot make infinite, and no
// element that rounding alone saturates. What is kept is then known as masks from the start, and where left is a power of
// two it scales before the division as well as after. False, and x undefined, where a lane is not plain.
template <int N, int M>
NM_INLINE bool plain(Fixed<N, M> p, const float* g, Uints word, Floats* x) {
    Floats open[M];
    NM_UNROLL_8 for (int i = 0; i < M; ++i) open[i] = magnitude(load(g + i * kLanes));
    Floats least = open[0], sum = tree(open, p);
    NM_UNROLL_8 for (int i = 1; i < M; ++i) least = smaller_magnitude(least, open[i]);
    if (__builtin_expect(!all(both(below(sum, splat(kScalable)), below(Floats{}, least))), 0)) return false;

    Flags full[M];
    NM_UNROLL_8 for (int i = 0; i < M; ++i) full[i] = none();
    Uints count = splat(uint32_t(N));
    Floats left = splat(float(N));
    for (int round = 1; round < N; ++round) {
        const Floats each = left;
        NM_UNROLL_8 for (int i = 0; i < M; ++i) {
            const Flags now = at_least(open[i] * each, sum);
            open[i] = only_where_not(now, open[i]);
            count = one_less(now, count);
            full[i] = round == 1 ? now : either(full[i], now);
        }
        left = counted(count);
        sum = tree(open, p);  // the same where nothing was taken away
    }
    Floats largest = open[0];
    NM_UNROLL_8 for (int i = 1; i < M; ++i) largest = larger_magnitude(largest, open[i]);
    if (__builtin_expect(any(at_least(largest * left, sum)), 0)) return false;

    Flags after_full[M];  // all that follow are full
    if constexpr (N > 1) {
        after_full[M - 2] = full[M - 1];
        NM_UNROLL_8 for (int i = M - 3; i >= 0; --i) after_full[i] = both(full[i + 1], after_full[i + 1]);
    }
    const Uints total = count << 24, shift = kOne - (word >> 8), end = total + shift;
    const Floats value = N <= 2 ? sum * inverse_power_of_two(left) : sum / left, scale = left * splat(kTwo24);
    Uints cumulative = Uints{}, before = shift >> 24;
    NM_UNROLL_8 for (int i = 0; i < M; ++i) {
        Uints after = end;
        if (i + 1 < M) {
            const Floats share = N <= 2 ? (open[i] * scale) / sum : ((open[i] * left) / sum) * splat(kTwo24);
            cumulative = smaller(i ? cumulative + truncated(share) : truncated(share), total);
            after = cumulative + shift;
            if constexpr (N > 1) after = choose(after_full[i], end, after);
        }
        const Uints whole = after >> 24;
        const Floats there = load(g + i * kLanes);
        x[i] = choose(equal(whole, before), N > 1 ? only_where(full[i], there) : Floats{}, with_sign(value, there));
        before = whole;
    }
    return true;
}

NM_INLINE bool plain(Any, const float*, Uints, Floats*) { return false; }

template <class P>
NM_INLINE void exact(P p, const float* g, Uints word, Floats* x) {
    if (plain(p, g, word, x)) return;
    Floats result[P::capacity];  // not x: what a call writes to stays in memory
    exact_of_any(p, g, word, result);
    NM_UNROLL_8 for (int i = 0; i < p.m; ++i) x[i] = result[i];
}

}  // namespace
}  // namespace nm
