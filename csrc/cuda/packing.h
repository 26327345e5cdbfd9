// Shared by packing kernels: converting elements to values, and small groups other than 2:4 in registers.
#pragma once

#include "../core/bitpack.h"
#include "memory.h"
#include "two_of_four.h"

namespace nm::cuda {

// The rule that chooses the kept elements; codes passed by Python.
enum Select : int { kMagnitude = 0, kTransposable = 1, kGiven = 2, kThreshold = 3 };

// The layout of indices; codes passed by Python. See reference/layouts.py.
enum Layout : int { kCanonical = 0, kMmaSp = 1, kWgmmaSp = 2, kWgmmaSp8 = 3 };

template <class T>
NM_DEVICE T of_bits(uint32_t bits) {
    if constexpr (sizeof(T) == 2) {
        return T{uint16_t(bits)};
    } else {
        return bits_float(bits);
    }
}

template <class T>
NM_DEVICE uint32_t bits_of(T x) {
    if constexpr (sizeof(T) == 2) {
        return x.bits;
    } else {
        return float_bits(x);
    }
}

// Rounds one kept element to the stored type; unchanged bits for the same type.
template <class In, class Out>
NM_DEVICE Out converted(In x) {
    if constexpr (std::is_same_v<In, Out>) {
        return x;
    } else {
        return from_float<Out>(to_float(x));
    }
}

NM_DEVICE float scale_at(const float* scale) { return scale ? *scale : 1.0f; }

// Element i of `words`, for a compile-time i.
template <class T>
NM_DEVICE uint32_t element(const uint32_t* words, int i) {
    return sizeof(T) == 4 ? words[i] : i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu;
}

// Bits from a word of four bytes that are 0 or 1.
NM_DEVICE uint32_t four_flags(uint32_t bytes) { return (bytes * 0x01020408u) >> 24 & 15u; }

// The N kept elements of a group of M, for N = 1 or 2 and M = 4, 8 or 16, and their indices as they are packed.
template <class T, class P>
struct SmallGroup {
    static constexpr int N = P::n, M = P::m, kBits = M <= 4 ? 2 : 4, kWidth = N * kBits;
    static_assert(N <= 2 && M <= 16 && (M & (M - 1)) == 0);

    uint32_t code;
    uint32_t kept[N];  // bits of the elements; 16-bit ones twice over

    // By magnitude.
    NM_DEVICE explicit SmallGroup(const uint32_t* words) {
        uint32_t place[2];
        if constexpr (sizeof(T) == 2) {
            largest16(words, place);
        } else {
            largest32(words, place);
        }
        gather(words, place);
    }

    // By the bits of a mask: missing elements are zeros, bits that `stored` has in addition.
    NM_DEVICE SmallGroup(const uint32_t* words, uint32_t mask) {
        uint32_t stored = mask;
        NM_UNROLL
        for (int times = 0; times < N; ++times) stored |= __popc(stored) < N ? ~stored & (stored + 1u) : 0u;
        const uint32_t place[2] = {uint32_t(__ffs(stored) - 1) % M, uint32_t(31 - __clz(stored)) % M};
        gather(words, place);
        NM_UNROLL
        for (int k = 0; k < N; ++k) kept[k] = mask >> place[k] & 1u ? kept[k] : 0u;
    }

  private:
    // The key in the high half, a tie-break for the lower index in the low half.
    static NM_DEVICE void largest16(const uint32_t* words, uint32_t* place) {
        uint32_t most[2] = {0, 0};
        NM_UNROLL
        for (int i = 0; i < M; ++i) {
            const uint32_t high_half = i % 2 ? words[i / 2] : words[i / 2] << 16, mark = uint32_t(M - 1 - i);
            uint32_t key = (high_half & 0x7fff0000u) | mark, limit = (Key<T>::nan << 16) | mark;
            key = key < limit ? key : limit;
            if constexpr (N == 2) {
                const uint32_t loser = key < most[0] ? key : most[0];
                most[1] = loser > most[1] ? loser : most[1];
            }
            most[0] = key > most[0] ? key : most[0];
        }
        const uint32_t a = uint32_t(M - 1) ^ (most[0] & uint32_t(M - 1)), b = uint32_t(M - 1) ^ (most[1] & uint32_t(M - 1));
        place[0] = N == 2 && b < a ? b : a;
        place[1] = b < a ? a : b;
    }

    static NM_DEVICE void largest32(const uint32_t* words, uint32_t* place) {
        uint32_t most[2] = {0, 0}, at[2] = {0, 0};
        NM_UNROLL
        for (int i = 0; i < M; ++i) {
            uint32_t key = words[i] & 0x7fffffffu;
            key = (key < Key<float>::nan ? key : Key<float>::nan) + 1u;  // above the value for "none yet"
            const bool first = key > most[0], second = N == 2 && key > most[1];
            most[1] = first ? most[0] : second ? key : most[1];
            at[1] = first ? at[0] : second ? uint32_t(i) : at[1];
            most[0] = first ? key : most[0];
            at[0] = first ? uint32_t(i) : at[0];
        }
        place[0] = N == 2 && at[1] < at[0] ? at[1] : at[0];
        place[1] = at[1] < at[0] ? at[0] : at[1];
    }

    // Registers cannot be indexed: an element is selected by halving.
    static NM_DEVICE uint32_t at(const uint32_t* words, uint32_t place) {
        constexpr int count = M * int(sizeof(T)) / 4, steps = (M == 16 ? 4 : M == 8 ? 3 : 2) - (sizeof(T) == 2 ? 2 : 0);
        uint32_t left[count];
        NM_UNROLL
        for (int i = 0; i < count; ++i) left[i] = words[i];
        NM_UNROLL
        for (int s = 1; s <= steps; ++s) {
            const int half = count >> s;
            const bool upper = (place & uint32_t(M >> s)) != 0;
            NM_UNROLL
            for (int i = 0; i < count / 2; ++i) {
                if (i < half) left[i] = upper ? left[i + half] : left[i];
            }
        }
        if constexpr (sizeof(T) == 4) {
            return left[0];
        } else {
            return permute_bytes(left[0], left[1], 0x1010u + 0x2222u * (place & 3u));
        }
    }

    NM_DEVICE void gather(const uint32_t* words, const uint32_t* place) {
        code = place[0];
        if constexpr (N == 2) code |= place[1] << kBits;
        NM_UNROLL
        for (int k = 0; k < N; ++k) kept[k] = at(words, place[k]);
    }
};

// The sixteen elements of a quad from fp32.
template <class Out>
NM_DEVICE void round_quad(const uint32_t* words, uint32_t* rounded) {
    NM_UNROLL
    for (int i = 0; i < 8; ++i) rounded[i] = rounded_pair<Out>(bits_float(words[2 * i]), bits_float(words[2 * i + 1]));
}

// S-STE's values of a quad: soft threshold in the type of the weight, times the scale in fp32. A scale of 1 does not change them.
template <class In, class Out>
NM_DEVICE void shrink_quad(const uint32_t* kept, const uint32_t* third, float scale, uint32_t* values) {
    NM_UNROLL
    for (int g = 0; g < 4; ++g) {
        float x[2];
        if constexpr (sizeof(In) == 2) {
            const uint32_t pair = shrunk_pair<In>(kept[g], third[g]);
            x[0] = low_half<In>(pair) * scale;
            x[1] = high_half<In>(pair) * scale;
        } else {
            NM_UNROLL
            for (int k = 0; k < 2; ++k) x[k] = shrink(bits_float(kept[2 * g + k]), bits_float(third[g])) * scale;
        }
        if constexpr (sizeof(Out) == 2) {
            values[g] = rounded_pair<Out>(x[0], x[1]);
        } else {
            NM_UNROLL
            for (int k = 0; k < 2; ++k) values[2 * g + k] = float_bits(x[k]);
        }
    }
}

// The eight values of a quad from the words of its elements, given its mask; only the threshold uses `third`.
template <class In, class Out, int kSelect>
NM_DEVICE void quad_values(const uint32_t* words, uint32_t mask, const uint32_t* third, float scale, uint32_t* values) {
    if constexpr (kSelect == kThreshold) {
        uint32_t kept[8 * sizeof(In) / 4];
        pick_two<In>(words, mask, kept);
        shrink_quad<In, Out>(kept, third, scale, values);
    } else if constexpr (std::is_same_v<In, Out>) {
        pick_two<In>(words, mask, values);
    } else {
        // converts all, two per instruction: selecting pairs of 16 bits costs less than fp32
        uint32_t rounded[16 * sizeof(Out) / 4];
        round_quad<Out>(words, rounded);
        pick_two<Out>(rounded, mask, values);
    }
}

// A quad with a given `mask`: pads short groups, which changes `words`.
template <class In, class Out>
NM_DEVICE uint32_t pack_given_quad(uint32_t* words, uint32_t mask, uint32_t* values, bool& overfull) {
    if (!two_each(mask)) {
        overfull = overfull || more_than_two(mask);
        clear_unkept<In>(words, mask);
        mask = filled_up(mask);
    }
    quad_values<In, Out, kGiven>(words, mask, nullptr, 1.0f, values);
    return index_bytes_of(mask);
}

// A quad by magnitude or threshold. Both return the four bits of each group's indices, a group in a byte.
template <class In, class Out, int kSelect>
NM_DEVICE uint32_t pack_largest_quad(const uint32_t* words, float scale, uint32_t* values) {
    const LargestTwo<In> largest(words);
    quad_values<In, Out, kSelect>(words, largest.mask, largest.third, scale, values);
    return index_bytes_of(largest.mask);
}

}  // namespace nm::cuda
