// Unbiased n:m estimate of one group g (Chmiel et al., ICLR 2023): at most n non-zeros, E[x] = g.
//
// exact, of minimal variance: p_i = min(1, c |g_i|) with sum p = n. The k saturated elements are kept bit for bit; the
// others are sampled systematically with one 24-bit uniform u, in integers, because fp32 cumulative sums select too
// many elements for some u:
//
//   q_i = floor(|g_i| r / S * 2^24),  C_i = min(q_0 + .. + q_i, r 2^24),  r = n - k,  S = sum of the unsaturated |g|
//   kept iff (C_i + 2^24 - u) >> 24 > (C_{i-1} + 2^24 - u) >> 24;  value copysign(S / r, g_i)
//
// approx (n == 2): two draws without replacement, value copysign(|g_i| / p_i, g_i).
//
// Sums are balanced binary trees over the index. A group with at most n non-zeros is copied; one whose sum of
// magnitudes is not finite becomes NaN where its mask keeps.
#pragma once

#include "rank.h"

namespace nm {

constexpr float kTwo24 = 16777216.0f;
constexpr int64_t kOne24 = int64_t(1) << 24;

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

// What becomes of each element of the group.
enum Fate : uint8_t { kDropped = 0, kKept = 1, kSampled = 2, kPoisoned = 3 };

// Fills `fate`; kSampled elements get magnitude `sampled` (exact) or `share[i]` (approx).
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

    // The cases without sampling. True when the group is done. `a` must hold the magnitudes.
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

    NM_HD void exact(int n, int m, uint32_t u) {
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

    // Index of the element that u draws from magnitudes a (without `skipped`), each with probability a_i / sum.
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
