// Unbiased n:m estimate of one group g (Chmiel et al., ICLR 2023): at most n non-zeros, E[x] = g.
//
// exact, of minimal variance: p_i = min(1, c |g_i|) with sum p = n. Selection is systematic sampling: with p_0, p_1, ...
// laid end to end, every integer plus u in [0, 1) selects the element there.
//
//   by level, for n <= 2 and m = 2, 4, 8, 16, in floating point: with + - * min max and operations on bits alone, each
//   rounded once. Sampled elements rise to the level h = S, or for n = 2 min(S / 2, R), R the sum without the largest (the
//   least of all sums without one). With e the exponent of h and M = 8 2^e every sum below lies in [M, 2 M), where a float
//   is fixed point with quantum 2^(e - 20); H is h without its last three bits, a multiple of it.
//
//     x = 1 + (k + 1/2) / 2^16, k the upper 16 bits of the random word (m = 16: 15 bits)
//     T2 = M + x H, T1 = T2 - H;  C_i = M + min(a_0, H) + .. + min(a_i, H), a = |g|
//     i1 = #{i <= m - 2: C_i <= T1}, i2 = 1 + #{1 <= i <= m - 2: C_i <= T2};  kept: i1 and for n = 2 also i2
//
//   A kept element becomes sign(g) max(a, H), H rounded at random to the type of g by the lower bits of the word. T1 and T2
//   are H apart and no interval between two C is longer: no element is met twice, and every a >= H is met. T2 stays below
//   the last C by more than what sums are rounded: no zero is met. |E x - g| <= (2^-16 + (m / 2 + 3) 2^-20) h, for m = 16
//   2^-15. Where h is below the normal range or 2 M would not be finite, all is scaled by a power of two first.
//
//   in integers, for all other patterns, by one 24-bit uniform u. The k saturated elements are kept bit for bit:
//
//     q_i = floor(|g_i| r / S * 2^24),  C_i = min(q_0 + .. + q_i, r 2^24),  r = n - k,  S = sum of the unsaturated |g|
//     kept iff (C_i + 2^24 - u) >> 24 > (C_{i-1} + 2^24 - u) >> 24;  value copysign(S / r, g_i)
//
// approx (n == 2): two draws without replacement, value copysign(|g_i| / p_i, g_i).
//
// Sums are balanced binary trees over the index. A group with at most n non-zeros is copied; one whose sum of magnitudes is
// not finite becomes NaN at its mask.
#pragma once

#include "rank.h"

namespace nm {

constexpr float kTwo24 = 16777216.0f;
constexpr int64_t kOne24 = int64_t(1) << 24;

NM_HD constexpr bool has_level_rule(int n, int m) { return n <= 2 && n < m && (m == 2 || m == 4 || m == 8 || m == 16); }

// Levels that need no scaling: the normal range, and 2 M is finite.
constexpr float kLeastLevel = 1.17549435e-38f, kMostLevel = 0x1p124f, kLevelScale = 0x1p64f;

// H of the level h, and M.
NM_HD float level_grid(float h) { return bits_float(float_bits(h) & ~7u); }
NM_HD float level_base(float level) { return bits_float((float_bits(level) & 0x7f800000u) + (3u << 23)); }

// x of a random word
NM_HD float level_mark(uint32_t word, int m) {
    return bits_float(m < 16 ? ((word >> 9) & 0x7fff80u) | 0x3f800040u : ((word >> 9) & 0x7fff00u) | 0x3f800080u);
}

// Rounds H to type T at random with mean H, using the lower 16 (fp16: 13) bits of the word.
template <class T>
NM_HD float rounded_level(float level, uint32_t word);

template <>
NM_HD float rounded_level<float>(float level, uint32_t) {
    return level;
}

template <>
NM_HD float rounded_level<bf16>(float level, uint32_t word) {
    return bits_float((float_bits(level) + (word & 0xffffu)) & 0xffff0000u);
}

template <>
NM_HD float rounded_level<fp16>(float level, uint32_t word) {
    // below its normal range fp16 is fixed point with quantum 2^-24, as floats from 2^-14 on are when cut to 10 bits; H is then a
    // multiple of 2^-25, so that nothing is lost
    const float shift = level < 0x1p-14f ? 0x1p-14f : 0.0f;
    return bits_float((float_bits(level + shift) + (word & 0x1fffu)) & 0xffffe000u) - shift;
}

// ((a0 + a1) + (a2 + a3)) + ...; an odd one out moves up alone, which is the same as padding with zeros. Destroys `a`.
NM_HD float tree_sum(float* a, int count) {
    while (count > 1) {
        const int half = count / 2;
        for (int i = 0; i < half; ++i) a[i] = a[2 * i] + a[2 * i + 1];
        if (count & 1) a[half] = a[count - 1];
        count = half + (count & 1);
    }
    return a[0];
}

// The outcome for each element of the group.
enum Fate : uint8_t { kDropped = 0, kKept = 1, kSampled = 2, kPoisoned = 3 };

// Fills `fate`; kSampled elements get magnitude value[i].
template <int Capacity>
struct Group {
    float a[Capacity];      // magnitudes
    float scratch[Capacity];
    uint8_t fate[Capacity];
    float value[Capacity];  // magnitude of each kSampled element

    // S over the elements that are not kept so far
    NM_HD float open_sum(int m) {
        for (int i = 0; i < m; ++i) scratch[i] = fate[i] ? 0.0f : a[i];
        return tree_sum(scratch, m);
    }

    NM_HD float sum_without(int m, int skipped) {
        for (int i = 0; i < m; ++i) scratch[i] = i == skipped ? 0.0f : a[i];
        return tree_sum(scratch, m);
    }

    // Handles the cases without sampling; returns true if the group is done. `a` must hold the magnitudes.
    NM_HD bool settle(int n, int m, float& sum) {
        int non_zeros = 0;
        for (int i = 0; i < m; ++i) {
            fate[i] = kDropped;
            non_zeros += a[i] != 0.0f;
        }
        sum = open_sum(m);
        if (!is_finite(sum)) {
            uint32_t keys[Capacity];
            for (int i = 0; i < m; ++i) keys[i] = Key<float>::of(a[i]);
            mask_group(keys, n, m, Key<float>::bits, fate);
            for (int i = 0; i < m; ++i) fate[i] = fate[i] ? kPoisoned : kDropped;
            return true;
        }
        if (non_zeros > n) return false;
        for (int i = 0; i < m; ++i) fate[i] = a[i] != 0.0f ? kKept : kDropped;
        return true;
    }

    // T: the type of g
    template <class T>
    NM_HD void exact(int n, int m, uint32_t word) {
        has_level_rule(n, m) ? by_level<T>(n, m, word) : in_integers(n, m, word >> 8);
    }

    template <class T>
    NM_HD void by_level(int n, int m, uint32_t word) {
        float sum;
        if (settle(n, m, sum)) return;
        float h = n == 1 ? sum : 0.5f * sum;
        for (int i = 0; n == 2 && i < m; ++i) {
            const float rest = sum_without(m, i);
            h = rest < h ? rest : h;
        }
        const float up = h < kLeastLevel ? kLevelScale : h >= kMostLevel ? 1.0f / kLevelScale : 1.0f;
        const float level = level_grid(h * up), base = level_base(level);
        const float second = base + level_mark(word, m) * level, first = second - level;
        int kept[2] = {0, 1};
        float c = base;
        for (int i = 0; i < m - 1; ++i) {
            const float x = a[i] * up;
            c = c + (x < level ? x : level);
            kept[0] += c <= first;
            kept[1] += i > 0 && c <= second;
        }
        const float rounded = rounded_level<T>(level * (1.0f / up), word);
        for (int k = 0; k < n; ++k) {
            const int i = kept[k];
            fate[i] = kSampled;
            value[i] = a[i] > rounded ? a[i] : rounded;
        }
    }

    NM_HD void in_integers(int n, int m, uint32_t u) {
        float sum;
        if (settle(n, m, sum)) return;
        int kept = 0;
        for (bool grew = true; grew && kept < n;) {
            const float left = float(n - kept);
            grew = false;
            for (int i = 0; i < m; ++i) {
                if (fate[i] == kDropped && a[i] != 0.0f && a[i] * left >= sum) {
                    fate[i] = kKept;
                    ++kept;
                    grew = true;
                }
            }
            if (grew) sum = open_sum(m);
        }
        if (kept < n) systematic(n - kept, m, sum, u);
    }

    NM_HD void systematic(int r, int m, float sum, uint32_t u) {
        const int64_t total = int64_t(r) << 24;
        const float left = float(r);
        int last = -1;
        for (int i = 0; i < m; ++i) last = fate[i] == kDropped && a[i] != 0.0f ? i : last;
        int64_t cumulative = 0, before = kOne24 - int64_t(u);
        for (int i = 0; i <= last; ++i) {
            if (fate[i] == kDropped) cumulative += int64_t(((a[i] * left) / sum) * kTwo24);
            if (cumulative > total || i == last) cumulative = total;
            const int64_t after = cumulative + kOne24 - int64_t(u);
            if ((after >> 24) > (before >> 24)) {
                fate[i] = kSampled;
                value[i] = sum / left;
            }
            before = after;
        }
    }

    // The index that u draws from magnitudes a (without `skipped`), each with probability a_i / sum.
    NM_HD int draw(int m, float sum, int skipped, uint32_t u) const {
        int last = -1;
        for (int i = 0; i < m; ++i) last = i != skipped && a[i] != 0.0f ? i : last;
        int64_t cumulative = 0;
        for (int i = 0; i < last; ++i) {
            if (i != skipped) cumulative += int64_t((a[i] / sum) * kTwo24);
            if (cumulative > kOne24) cumulative = kOne24;
            if (int64_t(u) < cumulative) return i;
        }
        return last;
    }

    NM_HD void approx(int m, uint32_t u0, uint32_t u1) {
        float sum, rest[Capacity];
        if (settle(2, m, sum)) return;
        for (int j = 0; j < m; ++j) rest[j] = sum_without(m, j);
        const int first = draw(m, sum, -1, u0);
        const int second = draw(m, rest[first], first, u1);
        const int both[2] = {first, second};
        for (int i : both) {
            float p = a[i] / sum;
            for (int j = 0; j < m; ++j) {
                if (j != i) p = p + (a[i] / rest[j]) * (a[j] / sum);
            }
            const float floor = 1.0f / kTwo24;
            p = p < floor ? floor : p;
            fate[i] = kSampled;
            value[i] = a[i] / p;
        }
    }

    template <class T>
    NM_HD T result(int i, T g) const {
        if (fate[i] == kDropped) return T{};
        if (fate[i] == kKept) return g;
        return from_float<T>(fate[i] == kSampled ? with_sign(value[i], to_float(g)) : bits_float(0x7fc00000u));
    }
};

}  // namespace nm
