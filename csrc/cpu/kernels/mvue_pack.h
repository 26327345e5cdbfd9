// core/bitpack.h for kLanes groups at once: what is not zero in x[m], in order of index, to slots of the compressed form.
//
// Slot k of lane l is values[k * kLanes + l]; its position goes to bits [k * bits, (k + 1) * bits) of a row of words, of
// which lane l has words[i * kLanes + l]. The words must have been zero where positions go.
#pragma once

#include "../../core/bitpack.h"
#include "../../core/dispatch.h"
#include "simd/simd.h"

namespace nm {
namespace {

struct Slots {
    float* values;
    uint32_t* words;
    uint32_t k;  // the next slot
};

// Where fewer than N are stored, the lowest others too: their value is 0.
template <int N, int M>
NM_INLINE void pad(Flags* stored) {
    Uints missing = splat(uint32_t(N));
    NM_UNROLL_8 for (int i = 0; i < M; ++i) missing = missing - choose(stored[i], splat(1u), splat(0u));
    NM_UNROLL_8 for (int i = 0; i < M; ++i) {
        const Flags padding = without(nonzero(missing), stored[i]);
        missing = missing - choose(padding, splat(1u), splat(0u));
        stored[i] = either(stored[i], padding);
    }
}

// The first and, where N is 2, the last of what is stored. False: fewer than N are stored somewhere.
template <int N, int M>
NM_INLINE bool first_and_last(const Flags* stored, const Floats* x, Floats* value, Uints* position) {
    constexpr uint32_t empty = 0x100;
    value[0] = value[N - 1] = Floats{};
    position[0] = position[N - 1] = splat(empty);
    NM_UNROLL_8 for (int i = M - 1; i >= 0; --i) {
        value[0] = choose(stored[i], x[i], value[0]);
        position[0] = choose(stored[i], splat(uint32_t(i)), position[0]);
    }
    if constexpr (N == 1) return !any(common(position[0], splat(empty)));
    NM_UNROLL_8 for (int i = 0; i < M; ++i) {
        value[1] = choose(stored[i], x[i], value[1]);
        position[1] = choose(stored[i], splat(uint32_t(i)), position[1]);
    }
    return !any(equal(position[0], position[1]));
}

// The same for any N: what is stored moves in from the end.
template <int N, int M>
NM_INLINE bool shift_in(const Flags* stored, const Floats* x, Floats* value, Uints* position) {
    if constexpr (N <= 2) return first_and_last<N, M>(stored, x, value, position);
    constexpr uint32_t empty = 0x100;
    for (int s = 0; s < N; ++s) value[s] = Floats{}, position[s] = splat(empty);
    NM_UNROLL_8 for (int i = 0; i < M; ++i) {
        for (int s = N - 1 - i > 0 ? N - 1 - i : 0; s < N; ++s) {
            value[s] = choose(stored[i], s + 1 < N ? value[s + 1] : x[i], value[s]);
            position[s] = choose(stored[i], s + 1 < N ? position[s + 1] : splat(uint32_t(i)), position[s]);
        }
    }
    return !any(common(position[0], splat(empty)));
}

template <int N, int M>
NM_INLINE void put(Fixed<N, M>, const Floats* value, const Uints* position, Slots& to) {
    constexpr uint32_t bits = M <= 4 ? 2 : M <= 16 ? 4 : 8;
    static_assert(32 % (N * bits) == 0, "the positions of a group must not straddle two words");
    Uints code = Uints{};
    for (int s = 0; s < N; ++s) {
        store(to.values + (to.k + uint32_t(s)) * kLanes, value[s]);
        code |= position[s] << (uint32_t(s) * bits);
    }
    float* word = reinterpret_cast<float*>(to.words) + to.k * bits / 32 * kLanes;
    store(word, float_of(bits_of(load(word)) | code << (to.k * bits % 32)));
    to.k += N;
}

template <int N, int M>
NM_INLINE void pack(Fixed<N, M> p, const Floats* x, Slots& to) {
    Flags stored[M];
    NM_UNROLL_8 for (int i = 0; i < M; ++i) stored[i] = nonzero(x[i]);
    Floats value[N];
    Uints position[N];
    if (!shift_in<N, M>(stored, x, value, position)) {
        pad<N, M>(stored);
        shift_in<N, M>(stored, x, value, position);
    }
    put(p, value, position, to);
}

// Any N:M, slot by slot.
inline void pack(Any p, const Floats* x, Slots& to) {
    const int bits = index_bits(p.m);
    int64_t next[kLanes];
    int missing[kLanes];
    for (int l = 0; l < kLanes; ++l) next[l] = to.k, missing[l] = p.n;
    for (int i = 0; i < p.m; ++i) {
        for (unsigned stored = lanes_of(nonzero(x[i])); stored != 0; stored &= stored - 1) --missing[__builtin_ctz(stored)];
    }
    unsigned open = 0;
    for (int l = 0; l < kLanes; ++l) open |= unsigned(missing[l] > 0) << l;
    for (int i = 0; i < p.m; ++i) {
        const unsigned kept = lanes_of(nonzero(x[i]));
        for (unsigned stored = kept | open; stored != 0; stored &= stored - 1) {
            const int l = __builtin_ctz(stored);
            if (!(kept >> l & 1) && --missing[l] == 0) open &= ~(1u << l);
            const int64_t k = next[l]++;
            to.values[k * kLanes + l] = x[i][l];
            to.words[k * bits / 32 * kLanes + l] |= uint32_t(i) << (k * bits % 32);
        }
    }
    to.k += uint32_t(p.n);
}

}  // namespace
}  // namespace nm
