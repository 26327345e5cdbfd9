// MVUE of 2:4 within a thread: a strip of 16 consecutive elements, almost never a division.
//
// With the level h = S / (2 - k) to which sampled elements rise, the estimate of core/mvue.h is systematic sampling of all
// elements with weights p_i = min(|g_i| / h, 1), which sum up to 2: a saturated element has weight 1 and is always met. So
// element i is kept iff floor(P_i - v) > floor(P_{i-1} - v), P_i = p_0 + .. + p_i, v = u 2^-24, and becomes max(|g_i|, h).
//
// h is S / 2, or where an element is saturated the sum R without the largest: h = min(S / 2, R), to a rounding. Are two
// saturated, the others weigh next to nothing.
//
// The definition rounds q_i = |g_i| / h 2^24 down to an integer. Here P_i - v is computed with errors of some 2^-21, by a
// rough reciprocal of h, and whatever is so near to an integer that the definition might see it on the other side is
// left to mvue_group.h: `doubt`, some 2^-16 of all groups. What has been decided has the bits of the definition.
//
// Errors in units of 2^-21: p 2 (h and its reciprocal), additions 1.5, the definition's own rounding down and sums 1.1,
// elements that the definition drops .5, u's last bits 1: 6.1. kMargin is 8.
#pragma once

#include "../core/philox.h"
#include "mvue_group.h"
#include "ptx.h"
#include "ptx_halves.h"

namespace nm::cuda {

template <class T>
struct Strip {
    static constexpr int n = 2, m = 4, elements = 16, groups = elements / m;
    static constexpr int code_bytes = groups * n * 2 / 8;
    static constexpr int words = elements * int(sizeof(T)) / 4, value_words = groups * n * int(sizeof(T)) / 4;

    uint32_t values[value_words];
    uint32_t code;  // the indices, packed: 2 bits each

    // The bits of element i in dense layout.
    NM_DEVICE uint32_t dense(int i) const {
        const int first = i / m * n;
        uint32_t found = 0;
        NM_UNROLL
        for (int k = first; k < first + n; ++k) {
            if (int(code >> (k * 2) & 3u) == i % m) found = value(k);
        }
        return found;
    }
    // The bits of `code` that belong to groups of which `left` are there; a row's spare bits are zero.
    static NM_DEVICE uint32_t code_mask(int64_t left) { return left >= groups ? ~0u : left <= 0 ? 0u : (1u << (int(left) * n * 2)) - 1u; }
    NM_DEVICE uint32_t value(int k) const { return sizeof(T) == 4 ? values[k] : values[k / 2] >> (k % 2 * 16) & 0xffffu; }
    NM_DEVICE void put(int k, uint32_t bits_of_it) {
        if constexpr (sizeof(T) == 4) {
            values[k] = bits_of_it;
        } else {
            values[k / 2] = (values[k / 2] & (k % 2 ? 0xffffu : 0xffff0000u)) | bits_of_it << (k % 2 * 16);
        }
    }
};

// The random words of groups j to j + 3: word j & 3 of block j >> 2.
NM_DEVICE void strip_words(uint64_t seed, uint64_t offset, int64_t j, uint32_t (&words)[4]) {
    const uint64_t counter = uint64_t(j) >> 2;
    const int skip = int(j & 3);
    uint32_t w[8];
    const Words first = philox_block(seed, offset, counter);
    NM_UNROLL
    for (int i = 0; i < 4; ++i) w[i] = w[i + 4] = first.w[i];
    if (skip != 0) {
        const Words second = philox_block(seed, offset, counter + 1);
        NM_UNROLL
        for (int i = 0; i < 4; ++i) w[i + 4] = second.w[i];
        NM_UNROLL
        for (int i = 0; i < 7; ++i) w[i] = skip & 1 ? w[i + 1] : w[i];
        NM_UNROLL
        for (int i = 0; i < 6; ++i) w[i] = skip & 2 ? w[i + 2] : w[i];
    }
    NM_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = w[i];
}

// P - v + 5 in [4, 8), where a float's last bit is worth 2^-21 and bits 21 and 22 count the integers passed.
constexpr uint32_t kFive = 0x40a00000u;
constexpr float kFine = 2097152.0f, kLeast = 1.17549435e-38f;
constexpr uint32_t kGreatest = 0x7e800000u;  // 2^126, whose reciprocal is normal

constexpr uint32_t kMargin = 8;  // of either side of an integer, in 2^-21

struct Place {
    float at;
    uint32_t doubt = 0;

    // the definition passes an integer at P >= v, but for u = 0 at P >= 1: for every u at P > v', u' = u - 1 modulo 2^24
    NM_DEVICE explicit Place(uint32_t word) : at(bits_float(kFive + kMargin - 0x1fffffu + ((255u - word) >> 11))) {}
    NM_DEVICE float pass(float magnitude, float reciprocal) {
        at = at + __saturatef(magnitude * reciprocal);
        doubt |= float_bits(at) ^ float_bits(at - float(2 * kMargin) / kFine);
        return at;
    }
};

// 1.0 where z < integer, else 0.0: z is a multiple of 2^-21, and these are exact.
NM_DEVICE float below(float z, float integer) { return __saturatef(__fmaf_rn(z, -kFine, integer * kFine)); }

struct Level {
    float sum, most, rest;  // rest: the sum without the largest
};

// Of 16-bit numbers any two that differ do so by more than sums are rounded: the least rest is that without the largest.
template <bool Narrow>
NM_DEVICE Level level_of(const float* x) {
    const auto pair = [](float a, float b) { return Level{fabsf(a) + fabsf(b), fmaxf(fabsf(a), fabsf(b)), fminf(fabsf(a), fabsf(b))}; };
    const Level l = pair(x[0], x[1]), r = pair(x[2], x[3]);
    const float left = l.rest + r.sum, right = l.sum + r.rest;
    return {l.sum + r.sum, fmaxf(l.most, r.most), Narrow ? fminf(left, right) : l.most >= r.most ? left : right};
}

// The strip of a thread; false where a group of it is in doubt. raw: its elements as they lie in memory.
NM_DEVICE bool estimate(const uint32_t (&raw)[16], const uint32_t (&words)[4], Strip<float>& out) {
    float values[8];
    bool sure = true;
    out.code = 0;
    NM_UNROLL
    for (int g = 0; g < 4; ++g) {
        float x[4], z[3], *value = values + g * 2;
        NM_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = bits_float(raw[g * 4 + i]);
        const Level l = level_of<false>(x);
        const float half = 0.5f * l.sum, h = l.most >= half ? l.rest : half, reciprocal = rough_reciprocal(h);
        Place place(words[g]);
        NM_UNROLL
        for (int i = 0; i < 3; ++i) z[i] = place.pass(fabsf(x[i]), reciprocal);
        // the first that passes 5, and the first that passes 6; if none has, the last
        float found[2] = {x[3], x[3]};
        uint32_t index[2] = {3, 3};
        NM_UNROLL
        for (int k = 0; k < 2; ++k) {
            NM_UNROLL
            for (int i = 2; i >= 0; --i) {
                const bool passed = z[i] >= float(5 + k);
                found[k] = passed ? x[i] : found[k];
                index[k] = passed ? uint32_t(i) : index[k];
            }
        }
        sure = sure && place.doubt < 1u << 21 && float_bits(l.sum) < kGreatest;
        NM_UNROLL
        for (int k = 0; k < 2; ++k) value[k] = with_sign(fabsf(found[k]) >= half ? fabsf(found[k]) : h, found[k]);
        if (!(h >= kLeast)) {
            // at most one element differs from zero, or it is for mvue_group.h
            sure = sure && h == 0.0f;
            value[0] = value[1] = 0.0f;
            index[0] = 0;
            index[1] = 1;
            NM_UNROLL
            for (int i = 0; i < 4; ++i) {
                value[i > 0] = x[i] != 0.0f ? x[i] : value[i > 0];
                if (i > 0) index[1] = x[i] != 0.0f ? uint32_t(i) : index[1];
            }
        }
        NM_UNROLL
        for (int k = 0; k < 2; ++k) out.code |= index[k] << ((g * 2 + k) * 2);
    }
    NM_UNROLL
    for (int i = 0; i < 8; ++i) out.values[i] = float_bits(values[i]);
    return sure;
}

// Groups with at most one element that differs from zero: it is kept, and where it is not the first, the first too.
NM_DEVICE void lone(uint32_t (&pairs)[2], float& first, float& second) {
    NM_UNROLL
    for (int i = 0; i < 2; ++i) {
        const uint32_t there = ((pairs[i] & 0x7fff7fffu) + 0x7fff7fffu) >> 15 & 0x00010001u;
        pairs[i] &= there * 0xffffu;  // -0.0 becomes 0.0
    }
    first = 0.0f;
    second = pairs[1] >> 16 ? 2.0f : pairs[1] ? 1.0f : 0.0f;
}

// Of 16-bit numbers, with little work for the integer units: indices are sums of zeros and ones in float, which build the
// selector of the bytes to take and, in the lower bits of another float, the packed indices.
template <class T>
NM_DEVICE bool estimate(const uint32_t (&raw)[8], const uint32_t (&words)[4], Strip<T>& out) {
    float first[4], second[4], h[4];  // first index, second index - 1
    uint32_t pairs[4][2], doubt = 0, greatest = 0;
    float least = 1.0f;
    NM_UNROLL
    for (int g = 0; g < 4; ++g) {
        pairs[g][0] = raw[2 * g];
        pairs[g][1] = raw[2 * g + 1];
        const float x[4] = {low_half<T>(raw[2 * g]), high_half<T>(raw[2 * g]), low_half<T>(raw[2 * g + 1]), high_half<T>(raw[2 * g + 1])};
        const Level l = level_of<true>(x);
        h[g] = fminf(0.5f * l.sum, l.rest);
        const float reciprocal = rough_reciprocal(h[g]);
        Place place(words[g]);
        const float z0 = place.pass(fabsf(x[0]), reciprocal), z1 = place.pass(fabsf(x[1]), reciprocal), z2 = place.pass(fabsf(x[2]), reciprocal);
        first[g] = below(z0, 5.0f) + below(z1, 5.0f);
        second[g] = below(z1, 6.0f) + below(z2, 6.0f);
        doubt |= place.doubt;
        greatest = max(greatest, float_bits(l.sum));
        least = fminf(least, h[g]);
    }
    bool sure = doubt < 1u << 21 && greatest < kGreatest;
    if (least < kLeast) {
        NM_UNROLL
        for (int g = 0; g < 4; ++g) {
            if (h[g] == 0.0f) {
                lone(pairs[g], first[g], second[g]);
            } else {
                sure = sure && h[g] >= kLeast;
            }
        }
    }
    float code = 8388608.0f + float(0x4444), scale = 1.0f;
    NM_UNROLL
    for (int g = 0; g < 4; ++g) {
        const float selector = __fmaf_rn(first[g], float(0x22), __fmaf_rn(second[g], float(0x2200), 8388608.0f + float(0x3210)));
        const uint32_t chosen = permute_bytes(pairs[g][0], pairs[g][1], float_bits(selector));
        out.values[g] = (chosen & 0x80008000u) | larger_pair<T>(chosen & 0x7fff7fffu, rounded_pair<T>(h[g], h[g]));
        code = __fmaf_rn(first[g], scale, __fmaf_rn(second[g], 4.0f * scale, code));
        scale *= 16.0f;
    }
    out.code = float_bits(code) & 0xffffu;
    return sure;
}

// The strip again, by the definition. element(i) is element i of the strip as a T.
template <class T, class F>
NM_DEVICE void estimate_exactly(const uint32_t (&words)[4], Strip<T>& out, const F& element) {
    constexpr int N = Strip<T>::n, M = Strip<T>::m;
#pragma unroll 1
    for (int g = 0; g < 4; ++g) {
        uint32_t word = 0;
        NM_UNROLL
        for (int k = 0; k < 4; ++k) word = k == g ? words[k] : word;
        T x[M];
        Shared<M, Alone> group;
        NM_UNROLL
        for (int i = 0; i < M; ++i) {
            x[i] = element(g * M + i);
            group.a[i] = magnitude(to_float(x[i]));
        }
        const Fates fates = group.exact(N, word >> 8);
        const uint32_t kept = fates.kept | fates.sampled | fates.poisoned;
        int missing = N - __popc(kept), stored = 0;
        uint32_t value[N] = {}, index[N] = {};
        NM_UNROLL
        for (int i = 0; i < M; ++i) {
            const bool keep = kept >> i & 1u, take = keep || missing > 0;
            if (!keep && missing > 0) --missing;
            uint32_t here = 0;
            const T estimate = group.template result<T>(fates, i, x[i]);
            memcpy(&here, &estimate, sizeof(T));
            NM_UNROLL
            for (int k = 0; k < N; ++k) {
                value[k] = take && stored == k ? (keep ? here : 0u) : value[k];
                index[k] = take && stored == k ? uint32_t(i) : index[k];
            }
            stored += take;
        }
        NM_UNROLL
        for (int k = 0; k < 4 * N; ++k) {
            if (k / N != g) continue;
            out.put(k, value[k % N]);
            out.code = (out.code & ~(3u << (k * 2))) | index[k % N] << (k * 2);
        }
    }
}

}  // namespace nm::cuda
