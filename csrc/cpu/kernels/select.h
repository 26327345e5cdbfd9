// Which of 64 consecutive elements their groups keep, one bit each, by the order of core/rank.h; M divides 64.
//
// Few instructions depend on the processor: Keys64 (simd/select_*.h) compares each element with one other of its group,
// finds the largest of each group, and answers in 64 bits. The rest is arithmetic on those, every bit a lane:
//
//   by rank     an element is kept iff fewer than n rank above it; half of the M-1 comparisons give the other half
//   by maximum  n times: the first of the largest is kept, and out of the running
#pragma once

#include "../../core/rank.h"
#include "patterns.h"

#if defined(__AVX512F__)
#include "simd/select_avx512.h"
#elif defined(__AVX2__)
#include "simd/select_avx2.h"
#else
#include "simd/select_plain.h"
#endif

namespace nm {
namespace {

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
    if constexpr (M > 1 && M <= 16 && M <= Keys64<T>::kRankable) return keep_by_rank<M>(Keys64<T>::of(w), n);
    if (n <= 8) return keep_by_maximum<M>(Keys64<T>::of(w), n);
    return keep_by_group<M>(w, n);
}

// The same for a pattern that the compiler knows. What is not below the N-th largest key is kept, if no tie makes that more
// than N; where one does the ranks decide. Among numbers of 16 bits ties are frequent.
template <class T, int N, int M>
inline __attribute__((always_inline)) Kept64<T> keep64(const T* w) {
    static_assert(64 % M == 0 && N >= 1 && N <= M, "whole groups in 64 elements");
    using Keys = Keys64<T>;
    constexpr bool two_of_four = N == 2 && M == 4 && Keys::kLanes >= M;
    if constexpr (two_of_four && (Keys::kExact || sizeof(T) == 2)) return Keys::of(w).two_of_four();
    if constexpr (N < M && Keys::kLanes >= M) {
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
