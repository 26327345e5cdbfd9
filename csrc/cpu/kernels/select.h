// Which of 64 consecutive elements their groups keep, one bit each, by the order of core/rank.h; M divides 64.
//
// Keys64 compares each element with one other of its group, finds the largest of each group, and answers in 64 bits. The rest is
// arithmetic on those, every bit a lane:
//
//   by rank     an element is kept iff fewer than n rank above it; half of the M-1 comparisons give the other half
//   by maximum  n times: the first of the largest is kept, and out of the running
#pragma once

#include "../../core/rank.h"
#include "network.h"
#include "patterns.h"
#include "simd/simd.h"

namespace nm {
namespace {

// Which of 64 elements are kept.
template <class T>
struct Kept64 {
    Marks64<T> dropped;

    static Kept64 of(uint64_t bits) { return {Marks64<T>::of(~bits)}; }
    uint64_t bits() const { return ~dropped.bits(); }
    int count() const { return 64 - dropped.count(); }
    void flags(uint8_t* out) const { dropped.unmarked(out); }                    // out[i] = whether i is kept
    void pick(const T* w, T* out) const { dropped.pick_unmarked(w, out); }       // out[i] = w[i] where it is kept, +0.0 elsewhere
    NM_INLINE Flags at(int i) const { return dropped.unmarked(i); }              // of fp32, the i-th kLanes
};

#if defined(__AVX2__)

// The keys of 64 elements in registers.
template <class T>
struct Keys64 {
    using L = KeyLanes<T>;
    static constexpr int kEach = sizeof(Register) / sizeof(T), kVectors = 64 / kEach;
    static constexpr int kLargestNth = kEach;                                     // the largest group that `nth` serves
    static constexpr int kLargestBeaten = kLanes == 16 ? kEach : 8;               // and `beaten`

    Register v[kVectors];

    static Keys64 of(const T* w) {
        Keys64 k;
        for (int i = 0; i < kVectors; ++i) k.v[i] = L::keys(load_as<Register>(w + i * kEach));
        return k;
    }

    // Bit i: the element `By` further on in the group of i, past its end from its start again, ranks above i.
    template <int M, int By>
    uint64_t beaten() const {
        static constexpr auto tie = [](int i) { return i % M >= M - By ? -1 : 0; };  // the other has the lower index: it wins ties
        static constexpr Table<typename L::Lane, decltype(tie)> handicap(tie);
        Marks64<T> found;
        for (int i = 0; i < kVectors; ++i) found.set(i, L::above(rotated<T, M, By>(v[i]), L::plus(v[i], handicap.template as<Register>())));
        return found.bits();
    }

    // The two largest of every four, ties to the lower index.
    Kept64<T> two_of_four() const {
        Kept64<T> kept;
        if constexpr (sizeof(T) == 4) {
            typename L::Marks dropped[kVectors];
            for (int i = 0; i < kVectors; i += 16 / kLanes) not_two_of_four(v + i, dropped + i);
            for (int i = 0; i < kVectors; ++i) kept.dropped.set(i, dropped[i]);
        } else {
            for (int i = 0; i < kVectors; ++i) kept.dropped.set(i, not_two_of_four<T>(v[i]));
        }
        return kept;
    }

    // Those that are not below the Rank-th largest of their group: Rank of them, or more where there are ties.
    template <int M, int Rank>
    Kept64<T> not_below() const {
        Kept64<T> kept;
        each_nth<M, Rank>([&](int i, Register least) { kept.dropped.set(i, L::above(least, v[i])); });
        return kept;
    }

    // The largest key of each group, in all its lanes.
    template <int M>
    Keys64 largest() const {
        Keys64 k = *this;
        fold<M, 1>(k);
        return k;
    }

    // The Rank-th largest key of each group, in all its lanes; groups that fit into a register.
    template <int M, int Rank>
    Keys64 nth() const {
        Keys64 k;
        each_nth<M, Rank>([&](int i, Register nth) { k.v[i] = nth; });
        return k;
    }

    uint64_t equal(const Keys64& other) const {
        Marks64<T> found;
        for (int i = 0; i < kVectors; ++i) found.set(i, L::equal(v[i], other.v[i]));
        return found.bits();
    }

    // These elements rank below all others from now on.
    void remove(uint64_t bits) {
        for (int i = 0; i < kVectors; ++i) v[i] = L::without(v[i], bits >> (i * kEach));
    }

  private:
    // f(i, the Rank-th largest of each group in the i-th register)
    template <int M, int Rank, class F>
    void each_nth(const F& f) const {
        if constexpr (L::template kQuads<M>) {
            NM_UNROLL_8 for (int i = 0; i < kVectors; i += 4) {
                const Register found = nth_of_quad<L, M, Rank>(v + i);
                f(i, L::template broadcast<0>(found));
                f(i + 1, L::template broadcast<1>(found));
                f(i + 2, L::template broadcast<2>(found));
                f(i + 3, L::template broadcast<3>(found));
            }
        } else {
            NM_UNROLL_8 for (int i = 0; i < kVectors; ++i) f(i, nth_of_group<L, M, Rank>(v[i]));
        }
    }

    template <int M, int Step>
    static void fold(Keys64& k) {
        if constexpr (Step < M && Step < kEach) {
            for (auto& one : k.v) one = L::max(one, exchange<Step * int(sizeof(T))>(one));
            fold<M, 2 * Step>(k);
        } else if constexpr (Step < M) {
            constexpr int apart = Step / kEach;
            for (int i = 0; i < kVectors; ++i) {
                if (!(i & apart)) k.v[i] = k.v[i ^ apart] = L::max(k.v[i], k.v[i ^ apart]);
            }
            fold<M, 2 * Step>(k);
        }
    }
};

#else

// The same as an array.
template <class T>
struct Keys64 {
    static constexpr int kLargestNth = 1, kLargestBeaten = 8;

    int32_t v[64];

    static Keys64 of(const T* w) {
        Keys64 k;
        for (int i = 0; i < 64; ++i) k.v[i] = int32_t(Key<T>::of(w[i]));
        return k;
    }

    template <int M, int By>
    uint64_t beaten() const {
        uint64_t bits = 0;
        for (int g = 0; g < 64; g += M) {
            for (int i = 0; i < M; ++i) {
                const int tie = i >= M - By;  // the other has the lower index: it wins ties
                bits |= uint64_t(v[g + (i + By) % M] > v[g + i] - tie) << (g + i);
            }
        }
        return bits;
    }

    Kept64<T> two_of_four() const {
        Kept64<T> kept;
        for (int i = 0; i < 64 / kLanes; ++i) kept.dropped.set(i, not_two_of_four(load_as<Ints>(v + kLanes * i)));
        return kept;
    }

    template <int M>
    Keys64 largest() const {
        Keys64 k;
        for (int g = 0; g < 64; g += M) {
            int32_t top = v[g];
            for (int i = 1; i < M; ++i) top = v[g + i] > top ? v[g + i] : top;
            for (int i = 0; i < M; ++i) k.v[g + i] = top;
        }
        return k;
    }

    uint64_t equal(const Keys64& other) const {
        uint64_t bits = 0;
        for (int i = 0; i < 64; ++i) bits |= uint64_t(v[i] == other.v[i]) << i;
        return bits;
    }

    void remove(uint64_t bits) {
        for (int i = 0; i < 64; ++i) v[i] |= -int32_t((bits >> i) & 1);
    }
};

#endif

// `pattern` (M bits) in every field of M bits.
template <int M>
constexpr uint64_t in_every_field(uint64_t pattern) {
    uint64_t all = 0;
    for (int at = 0; at < 64; at += M) all |= pattern << at;
    return all;
}

// Each field of M bits rotated up by `By`.
template <int M, int By>
uint64_t rotate_fields(uint64_t x) {
    constexpr uint64_t low = in_every_field<M>((uint64_t(1) << By) - 1);
    return ((x << By) & ~low) | ((x >> (M - By)) & low);
}

// 64 counters below M, counter i in bit i of each plane.
template <int M>
struct Counters {
    uint64_t plane[6] = {};

    void add(uint64_t bits) {
        for (int p = 0; (2 << p) <= M; ++p) {
            const uint64_t carry = plane[p] & bits;
            plane[p] ^= bits;
            bits = carry;
        }
    }

    uint64_t below(int n) const {
        uint64_t less = 0;
        for (int p = 0; (2 << p) <= M; ++p) less = (n >> p) & 1 ? less | ~plane[p] : less & ~plane[p];
        return less;
    }
};

// i beaten by its neighbour says all about the neighbour being beaten by i: exactly one of the two ranks above.
template <int M, int By, class T>
void count_beaten(const Keys64<T>& keys, Counters<M>& rank) {
    if constexpr (2 * By <= M) {
        const uint64_t beaten = keys.template beaten<M, By>();
        rank.add(beaten);
        if constexpr (2 * By < M) rank.add(~rotate_fields<M, By>(beaten));
        count_beaten<M, By + 1>(keys, rank);
    }
}

template <int M, class T>
uint64_t keep_by_rank(const Keys64<T>& keys, int n) {
    Counters<M> rank;
    count_beaten<M, 1>(keys, rank);
    return rank.below(n);
}

template <int M, class T>
uint64_t keep_by_maximum(Keys64<T> keys, int n) {
    constexpr uint64_t ones = in_every_field<M>(1);
    uint64_t kept = 0;
    for (int k = 0; k < n; ++k) {
        const uint64_t largest = keys.equal(keys.template largest<M>());
        const uint64_t first = largest & ~(largest - ones);  // every field has a bit, so none borrows
        kept |= first;
        if (k + 1 < n) keys.remove(first);
    }
    return kept;
}

// The same for any n, by core/rank.h.
template <int M, class T>
uint64_t keep_by_group(const T* w, int n) {
    uint64_t kept = 0;
    for (int g = 0; g < 64; g += M) {
        uint32_t keys[M];
        uint8_t keep[M];
        for (int i = 0; i < M; ++i) keys[i] = Key<T>::of(w[g + i]);
        mask_group(keys, n, M, Key<T>::bits, keep);
        for (int i = 0; i < M; ++i) kept |= uint64_t(keep[i]) << (g + i);
    }
    return kept;
}

template <int M, class T>
uint64_t keep_some(const T* w, int n) {
    if (n == M) return ~uint64_t(0);
    if constexpr (M == 1) return ~uint64_t(0);
    if (M > 2 && n == 1) return keep_by_maximum<M>(Keys64<T>::of(w), 1);
    if constexpr (M > 1 && M <= 16 && M <= Keys64<T>::kLargestBeaten) return keep_by_rank<M>(Keys64<T>::of(w), n);
    if (n <= 8) return keep_by_maximum<M>(Keys64<T>::of(w), n);
    return keep_by_group<M>(w, n);
}

// The same for a pattern that the compiler knows. What is not below the N-th largest key is kept, if no tie makes that more
// than N; where one does the ranks decide. Among numbers of 16 bits ties are frequent.
template <class T, int N, int M>
NM_INLINE Kept64<T> keep64(const T* w) {
    static_assert(64 % M == 0 && N >= 1 && N <= M, "whole groups in 64 elements");
    using Keys = Keys64<T>;
    if constexpr (N == 2 && M == 4) return Keys::of(w).two_of_four();
    if constexpr (N < M && M <= Keys::kLargestNth) {
        const Kept64<T> kept = Keys::of(w).template not_below<M, N>();
        if (__builtin_expect(kept.count() == 64 / M * N, true)) return kept;
    }
    return Kept64<T>::of(keep_some<M>(w, N));
}

template <class T>
using KeepFn = uint64_t(const T* w, int n, int m);

template <class T, int N, int M>
uint64_t keep_fixed(const T* w, int, int) {
    return keep64<T, N, M>(w).bits();
}

template <class T, int M>
uint64_t keep_any(const T* w, int n, int) {
    return keep_some<M>(w, n);
}

// The function for a pattern, the common ones specialised; null where M does not divide 64.
template <class T>
KeepFn<T>* keep_fn(int n, int m) {
    return for_pattern<KeepFn<T>>(
        n, m, [](auto N, auto M) -> KeepFn<T>* { return keep_fixed<T, N, M>; }, [](auto M) -> KeepFn<T>* { return keep_any<T, M>; }, nullptr);
}

}  // namespace
}  // namespace nm
