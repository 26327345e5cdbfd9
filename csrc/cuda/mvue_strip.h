// MVUE of 2:4 within a thread: a strip of 16 consecutive elements, by level as core/mvue.h has it, without a branch or a comparison.
//
// Sums C and marks T are multiples of a quantum q in [M, 2 M), M = 2^23 q. So C / q, T / q and their difference are whole numbers
// below 2^24, which fma gives exactly, and saturated to [0, 1] T / q + 1 - C / q is 1 where C <= T, else 0. Indices are sums of
// these. Integer operations and comparisons have half the rate of float arithmetic (CUDA programming guide, arithmetic throughput).
//
// mvue_group.h handles levels so small that 1 / q is not finite, and sums so large that M is not.
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
    // The bits of `code` for the `left` existing groups; a row's spare bits are zero.
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

// The random words of groups j to j + 3: word j & 3 of block j >> 2. Aligned: j is a multiple of 4.
template <bool Aligned>
NM_DEVICE void strip_words(uint64_t seed, uint64_t offset, int64_t j, uint32_t (&words)[4]) {
    const uint64_t counter = uint64_t(j) >> 2;
    const int skip = Aligned ? 0 : int(j & 3);
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

constexpr float kLeast = 0x1p-100f;

// The marks of a group in units of its quantum, plus 1, and the factor that converts sums to these units.
struct Marks {
    float level, base, inverse, first, second;

    NM_DEVICE Marks(float h, uint32_t word)
        : level(level_grid(h)), base(bits_float(float_bits(level) & 0x7f800000u) * 8.0f), inverse(bits_float((277u << 23) - float_bits(base))) {
        const float mark = base + level_mark(word, 4) * level;
        first = __fmaf_rn(mark - level, inverse, 1.0f);
        second = __fmaf_rn(mark, inverse, 1.0f);
    }
    // 1.0 where the sum c is at most the mark, else 0.0
    NM_DEVICE float passed(float mark, float c) const { return __saturatef(__fmaf_rn(c, -inverse, mark)); }
};

struct Level {
    float sum, h;

    NM_DEVICE explicit Level(const float* x) {
        const float l = fabsf(x[0]) + fabsf(x[1]), r = fabsf(x[2]) + fabsf(x[3]);
        const float rest = fminf(fminf(fabsf(x[0]), fabsf(x[1])) + r, l + fminf(fabsf(x[2]), fabsf(x[3])));
        sum = l + r;
        h = fminf(0.5f * sum, rest);
    }
};

// Which elements are selected: 1.0 or 0.0 for each sum except C_2, which T1 never reaches: T2 is below C_3, T1 a level below that.
struct Picks {
    float first[2], second[2];

    NM_DEVICE Picks(const float* x, const Marks& marks) {
        const float c0 = marks.base + fminf(fabsf(x[0]), marks.level), c1 = c0 + fminf(fabsf(x[1]), marks.level), c2 = c1 + fminf(fabsf(x[2]), marks.level);
        first[0] = marks.passed(marks.first, c0);
        first[1] = marks.passed(marks.first, c1);
        second[0] = marks.passed(marks.second, c1);
        second[1] = marks.passed(marks.second, c2);
    }

    // x[0], or x[1] or x[2] if one or both sums are passed: two of the finite numbers have weight 0.
    static NM_DEVICE float chosen(const float* x, const float (&passed)[2]) {
        return __fmaf_rn(x[2], passed[1], __fmaf_rn(x[1], passed[0] - passed[1], x[0] * (1.0f - passed[0])));
    }
};

// The results for a strip's groups: the first index and the second minus one, as floats; h and common data.
struct Found {
    float first[4], second[4], h[4], level[4];
    float least = 0.0f, sum = 0.0f;

    NM_DEVICE void put(int g, const Level& l, const Marks& marks, const Picks& picks) {
        first[g] = picks.first[0] + picks.first[1];
        second[g] = picks.second[0] + picks.second[1];
        h[g] = l.h;
        level[g] = marks.level;
        least = g ? fminf(least, l.h) : l.h;
        sum = g ? sum + l.sum : l.sum;
    }

    // The indices, packed, as the lower bits of a float.
    NM_DEVICE uint32_t code() const {
        float code = 8388608.0f + float(0x4444), scale = 1.0f;
        NM_UNROLL
        for (int g = 0; g < 4; ++g) {
            code = __fmaf_rn(first[g], scale, __fmaf_rn(second[g], 4.0f * scale, code));
            scale *= 16.0f;
        }
        return float_bits(code) & 0xffffu;
    }

    // False if a group needs mvue_group.h. lone(g) handles a group with at most one non-zero.
    template <class F>
    NM_DEVICE bool sure(const F& lone) {
        bool all = sum < kMostLevel;
        if (least < kLeast) {
            NM_UNROLL
            for (int g = 0; g < 4; ++g) {
                if (h[g] == 0.0f) {
                    lone(g);
                } else {
                    all = all && h[g] >= kLeast;
                }
            }
        }
        return all;
    }
};

// The strip of a thread; false if one of its groups needs mvue_group.h. raw: its elements as stored.
NM_DEVICE bool estimate(const uint32_t (&raw)[16], const uint32_t (&words)[4], Strip<float>& out) {
    Found found;
    NM_UNROLL
    for (int g = 0; g < 4; ++g) {
        float x[4];
        NM_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = bits_float(raw[g * 4 + i]);
        const Level l(x);
        const Marks marks(l.h, words[g]);
        const Picks picks(x, marks);
        const float value[2] = {Picks::chosen(x, picks.first), Picks::chosen(x + 1, picks.second)};
        NM_UNROLL
        for (int k = 0; k < 2; ++k) out.values[g * 2 + k] = float_bits(with_sign(fmaxf(fabsf(value[k]), marks.level), value[k]));
        found.put(g, l, marks, picks);
    }
    const bool sure = found.sure([&](int g) {
        // the non-zero is kept, and if it is not the first element, the first too
        float value[2] = {0.0f, 0.0f};
        found.first[g] = found.second[g] = 0.0f;
        NM_UNROLL
        for (int i = 0; i < 4; ++i) {
            const float x = bits_float(raw[g * 4 + i]);
            value[i > 0] = x != 0.0f ? x : value[i > 0];
            if (i > 1) found.second[g] = x != 0.0f ? float(i - 1) : found.second[g];
        }
        NM_UNROLL
        for (int k = 0; k < 2; ++k) out.values[g * 2 + k] = float_bits(value[k]);
    });
    out.code = found.code();
    return sure;
}

// Groups with at most one non-zero: it is kept, and if it is not the first element, the first too.
NM_DEVICE void lone(uint32_t (&pairs)[2], float& first, float& second) {
    NM_UNROLL
    for (int i = 0; i < 2; ++i) {
        const uint32_t there = ((pairs[i] & 0x7fff7fffu) + 0x7fff7fffu) >> 15 & 0x00010001u;
        pairs[i] &= there * 0xffffu;  // -0.0 becomes 0.0
    }
    first = 0.0f;
    second = pairs[1] >> 16 ? 2.0f : pairs[1] ? 1.0f : 0.0f;
}

// A level rounded at random, twice.
template <class T>
NM_DEVICE uint32_t level_pair(float level, uint32_t word) {
    if constexpr (std::is_same_v<T, bf16>) {
        const uint32_t bits = float_bits(level) + (word & 0xffffu);
        return permute_bytes(bits, bits, 0x3232);
    } else {
        const float rounded = rounded_level<T>(level, word);
        return rounded_pair<T>(rounded, rounded);
    }
}

// For 16-bit numbers the indices form a byte-permutation selector.
template <class T>
NM_DEVICE bool estimate(const uint32_t (&raw)[8], const uint32_t (&words)[4], Strip<T>& out) {
    uint32_t pairs[4][2];
    Found found;
    NM_UNROLL
    for (int g = 0; g < 4; ++g) {
        pairs[g][0] = raw[2 * g];
        pairs[g][1] = raw[2 * g + 1];
        const float x[4] = {low_half<T>(raw[2 * g]), high_half<T>(raw[2 * g]), low_half<T>(raw[2 * g + 1]), high_half<T>(raw[2 * g + 1])};
        const Level l(x);
        const Marks marks(l.h, words[g]);
        found.put(g, l, marks, Picks(x, marks));
    }
    const bool sure = found.sure([&](int g) { lone(pairs[g], found.first[g], found.second[g]); });
    NM_UNROLL
    for (int g = 0; g < 4; ++g) {
        const float selector = __fmaf_rn(found.first[g], float(0x22), __fmaf_rn(found.second[g], float(0x2200), 8388608.0f + float(0x3210)));
        const uint32_t chosen = permute_bytes(pairs[g][0], pairs[g][1], float_bits(selector));
        out.values[g] = larger_magnitudes<T>(chosen, level_pair<T>(found.level[g], words[g]));
    }
    out.code = found.code();
    return sure;
}

// Recomputes the strip with mvue_group.h. element(i) is element i of the strip as a T.
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
        const Fates fates = group.template by_level<T>(N, M, word);
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
