// The keys of 64 consecutive elements in AVX-512 registers: four of 16 lanes (fp32) or two of 32 (bf16, fp16).
// Keys are below 2^31 (2^15), so that signed comparisons order them and -1 is below them all.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include "../../../core/types.h"
#include "network.h"
#include "pack_avx512.h"

namespace nm {
namespace {

// Each lane takes the lane `Bytes` away in the pair of blocks of that size: an exchange of neighbours, 2 to 32 bytes wide.
template <int Bytes>
__m512i exchange(__m512i v) {
    if constexpr (Bytes == 2) return _mm512_rol_epi32(v, 16);
    if constexpr (Bytes == 4) return _mm512_shuffle_epi32(v, _MM_PERM_CDAB);
    if constexpr (Bytes == 8) return _mm512_shuffle_epi32(v, _MM_PERM_BADC);
    if constexpr (Bytes == 16) return _mm512_permutex_epi64(v, 0x4e);
    if constexpr (Bytes == 32) return _mm512_shuffle_i64x2(v, v, 0x4e);
}

// One number per lane, computed by the compiler.
template <class Lane, class F>
struct alignas(64) Table {
    Lane lane[64 / sizeof(Lane)];
    constexpr explicit Table(F f) : lane() {
        for (int i = 0; i < int(64 / sizeof(Lane)); ++i) lane[i] = Lane(f(i));
    }
    __m512i load() const { return _mm512_load_si512(lane); }
};

template <class T>
struct Lanes {  // bf16 and fp16
    using Lane = int16_t;
    static __m512i keys(const T* w) {
        const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(w), _mm512_set1_epi16(0x7fff));
        return _mm512_min_epi16(magnitude, _mm512_set1_epi16(int16_t(Key<T>::nan)));
    }
    static uint64_t above(__m512i a, __m512i b) { return _mm512_cmpgt_epi16_mask(a, b); }
    static uint64_t equal(__m512i a, __m512i b) { return _mm512_cmpeq_epi16_mask(a, b); }
    static __m512i max(__m512i a, __m512i b) { return _mm512_max_epi16(a, b); }
    static __m512i min(__m512i a, __m512i b) { return _mm512_min_epi16(a, b); }
    template <int Size>
    static __m512i across(__m512i v) {
        return exchange<2 * Size>(v);
    }
    static uint64_t at_least(__m512i a, __m512i b) { return _mm512_cmpge_epi16_mask(a, b); }
    static __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi16(a, b); }
    static __m512i minus(__m512i a, __m512i b) { return _mm512_sub_epi16(a, b); }
    static uint64_t signs(__m512i v) { return _mm512_movepi16_mask(v); }
    // Pairs of neighbours exchanged within groups of four: 1, 2 or 3 = both.
    template <int By>
    static __m512i crossed(__m512i v) {
        constexpr int order = By == 1 ? 0xb1 : By == 2 ? 0x4e : 0x1b;
        return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(v, order), order);
    }
    static __m512i without(__m512i v, uint64_t lanes) { return _mm512_mask_set1_epi16(v, __mmask32(lanes), -1); }
    static __m512i permute(__m512i v, __m512i from) { return _mm512_permutexvar_epi16(from, v); }
};

template <>
struct Lanes<float> {
    using Lane = int32_t;
    static __m512i keys(const float* w) {
        const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(w), _mm512_set1_epi32(0x7fffffff));
        return _mm512_min_epi32(magnitude, _mm512_set1_epi32(int32_t(Key<float>::nan)));
    }
    // Of four registers: the first holds the first of every four lanes, of all four of them, and so on.
    static void transpose(const __m512i* v, __m512i* to) {
        const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
        const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        to[0] = _mm512_unpacklo_epi64(a, c);
        to[1] = _mm512_unpackhi_epi64(a, c);
        to[2] = _mm512_unpacklo_epi64(b, d);
        to[3] = _mm512_unpackhi_epi64(b, d);
    }
    static uint64_t above(__m512i a, __m512i b) { return _mm512_cmpgt_epi32_mask(a, b); }
    static uint64_t equal(__m512i a, __m512i b) { return _mm512_cmpeq_epi32_mask(a, b); }
    static __m512i max(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
    static __m512i min(__m512i a, __m512i b) { return _mm512_min_epi32(a, b); }
    template <int Size>
    static __m512i across(__m512i v) {
        return exchange<4 * Size>(v);
    }
    static uint64_t at_least(__m512i a, __m512i b) { return _mm512_cmpge_epi32_mask(a, b); }
    static __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
    static __m512i minus(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
    static uint64_t signs(__m512i v) { return _mm512_movepi32_mask(v); }
    template <int By>
    static __m512i crossed(__m512i v) {
        return _mm512_shuffle_epi32(v, _MM_PERM_ENUM(By == 1 ? 0xb1 : By == 2 ? 0x4e : 0x1b));
    }
    static __m512i without(__m512i v, uint64_t lanes) { return _mm512_mask_set1_epi32(v, __mmask16(lanes), -1); }
    static __m512i permute(__m512i v, __m512i from) { return _mm512_permutexvar_epi32(from, v); }
};

// Which of 64 elements are kept.
template <class T>
struct Kept64 {
    uint64_t word;

    static Kept64 of(uint64_t bits) { return {bits}; }
    uint64_t bits() const { return word; }
    int count() const { return __builtin_popcountll(word); }
    void flags(uint8_t* out) const { flags_of(word, out); }
    void pick(const T* w, T* out) const { pick64(w, word, out); }
};

template <class T>
struct Keys64 {
    static constexpr int kLanes = 64 / sizeof(T), kVectors = sizeof(T);
    static constexpr int kRankable = kLanes;  // the largest group that `beaten` serves
    static constexpr bool kExact = true;   // two_of_four() is faster than nth()
    using L = Lanes<T>;

    __m512i v[kVectors];

    static Keys64 of(const T* w) {
        Keys64 k;
        for (int i = 0; i < kVectors; ++i) k.v[i] = L::keys(w + i * kLanes);
        return k;
    }

    // Bit i: the element `By` further on in the group of i, past its end from its start again, ranks above i.
    template <int M, int By>
    uint64_t beaten() const {
        static constexpr auto from = [](int i) { return i / M * M + (i + By) % M; };
        static constexpr auto tie = [](int i) { return i % M >= M - By ? -1 : 0; };  // the other has the lower index: it wins ties
        static constexpr Table<typename L::Lane, decltype(from)> rotation(from);
        static constexpr Table<typename L::Lane, decltype(tie)> handicap(tie);
        uint64_t bits = 0;
        for (int i = 0; i < kVectors; ++i) {
            __m512i other;
            if constexpr (M * sizeof(T) == 16) {
                other = _mm512_alignr_epi8(v[i], v[i], By * int(sizeof(T)));
            } else {
                other = L::permute(v[i], rotation.load());
            }
            bits |= L::above(other, L::plus(v[i], handicap.load())) << (i * kLanes);
        }
        return bits;
    }

    // The two largest of every four, ties to the lower index: those that at most one of the other three beats. Where the
    // other has the lower index it wins ties, this one is handicapped by 1; the sign of a difference says who wins.
    Kept64<T> two_of_four() const {
        static constexpr auto odd = [](int i) { return i % 2 ? -1 : 0; };
        static constexpr auto late = [](int i) { return i % 4 > 1 ? -1 : 0; };
        static constexpr Table<typename L::Lane, decltype(odd)> if_odd(odd);
        static constexpr Table<typename L::Lane, decltype(late)> if_late(late);
        uint64_t bits = 0;
        for (int i = 0; i < kVectors; ++i) {
            const __m512i later = L::plus(v[i], if_late.load());
            const __m512i one = L::minus(L::plus(v[i], if_odd.load()), L::template crossed<1>(v[i]));
            const __m512i two = L::minus(later, L::template crossed<2>(v[i])), three = L::minus(later, L::template crossed<3>(v[i]));
            bits |= L::signs(_mm512_ternarylogic_epi32(one, two, three, 0x17)) << (i * kLanes);
        }
        return {bits};
    }

    // Those that are not below the Rank-th largest of their group: Rank of them, or more where there are ties.
    template <int M, int Rank>
    Kept64<T> not_below() const {
        const Keys64 least = nth<M, Rank>();
        uint64_t bits = 0;
        for (int i = 0; i < kVectors; ++i) bits |= L::at_least(v[i], least.v[i]) << (i * kLanes);
        return {bits};
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
        if constexpr (kVectors == 4) {
            const __m512i found = nth_of_quad<L, M, Rank>(v);
            k.v[0] = _mm512_shuffle_epi32(found, _MM_PERM_AAAA);
            k.v[1] = _mm512_shuffle_epi32(found, _MM_PERM_BBBB);
            k.v[2] = _mm512_shuffle_epi32(found, _MM_PERM_CCCC);
            k.v[3] = _mm512_shuffle_epi32(found, _MM_PERM_DDDD);
        } else {
            for (int i = 0; i < kVectors; ++i) k.v[i] = nth_of_group<L, M, Rank>(v[i]);
        }
        return k;
    }

    uint64_t equal(const Keys64& other) const {
        uint64_t bits = 0;
        for (int i = 0; i < kVectors; ++i) bits |= L::equal(v[i], other.v[i]) << (i * kLanes);
        return bits;
    }

    // These elements rank below all others from now on.
    void remove(uint64_t bits) {
        for (int i = 0; i < kVectors; ++i) v[i] = L::without(v[i], bits >> (i * kLanes));
    }

  private:
    template <int M, int Step>
    static void fold(Keys64& k) {
        if constexpr (Step < M && Step < kLanes) {
            for (auto& one : k.v) one = L::max(one, exchange<Step * int(sizeof(T))>(one));
            fold<M, 2 * Step>(k);
        } else if constexpr (Step < M) {
            constexpr int apart = Step / kLanes;
            for (int i = 0; i < kVectors; ++i) {
                if (!(i & apart)) k.v[i] = k.v[i ^ apart] = L::max(k.v[i], k.v[i ^ apart]);
            }
            fold<M, 2 * Step>(k);
        }
    }
};

}  // namespace
}  // namespace nm

#endif
