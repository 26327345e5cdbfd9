// The keys of 64 consecutive elements in AVX2 registers: eight of 8 lanes (fp32) or four of 16 (bf16, fp16).
// Keys are below 2^31 (2^15), so that signed comparisons order them and -1 is below them all.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include "../../../core/types.h"
#include "network.h"

namespace nm {
namespace {

// Each lane takes the lane `Bytes` away in the pair of blocks of that size: an exchange of neighbours, 2 to 16 bytes wide.
template <int Bytes>
__m256i exchange(__m256i v) {
    if constexpr (Bytes == 2) return _mm256_or_si256(_mm256_slli_epi32(v, 16), _mm256_srli_epi32(v, 16));
    if constexpr (Bytes == 4) return _mm256_shuffle_epi32(v, 0xb1);
    if constexpr (Bytes == 8) return _mm256_shuffle_epi32(v, 0x4e);
    if constexpr (Bytes == 16) return _mm256_permute2x128_si256(v, v, 0x01);
}

// One number per lane, computed by the compiler.
template <class Lane, class F>
struct alignas(32) Table {
    Lane lane[32 / sizeof(Lane)];
    constexpr explicit Table(F f) : lane() {
        for (int i = 0; i < int(32 / sizeof(Lane)); ++i) lane[i] = Lane(f(i));
    }
    __m256i load() const { return _mm256_load_si256(reinterpret_cast<const __m256i*>(lane)); }
};

// What follows works on 64 truth values, each as all bits of a lane.
//
// Packed to signed bytes, pairs of registers come out interleaved by halves.
inline __m256i packed(__m256i a, __m256i b) { return _mm256_packs_epi16(a, b); }
inline __m256i packed(__m256i a, __m256i b, __m256i c, __m256i d) {
    return _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
}

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

template <class T>
struct Lanes;

inline uint64_t byte_bits(__m256i low, __m256i high) {
    return uint64_t(uint32_t(_mm256_movemask_epi8(high))) << 32 | uint32_t(_mm256_movemask_epi8(low));
}

// Bit i: lane i of 64 is set.
template <class T>
uint64_t lane_bits(const __m256i* v) {
    using L = Lanes<T>;
    return byte_bits(L::in_order(L::bytes(v, 0)), L::in_order(L::bytes(v, 1)));
}

template <class T>
struct Lanes {  // bf16 and fp16
    using Lane = int16_t;
    static __m256i keys(const T* w) {
        return _mm256_min_epi16(_mm256_and_si256(load256(w), _mm256_set1_epi16(0x7fff)), _mm256_set1_epi16(int16_t(Key<T>::nan)));
    }
    static __m256i above(__m256i a, __m256i b) { return _mm256_cmpgt_epi16(a, b); }
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi16(a, b); }
    static __m256i max(__m256i a, __m256i b) { return _mm256_max_epi16(a, b); }
    static __m256i min(__m256i a, __m256i b) { return _mm256_min_epi16(a, b); }
    template <int Size>
    static __m256i across(__m256i v) {
        return exchange<2 * Size>(v);
    }
    static __m256i plus(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
    static __m256i bytes(const __m256i* v, int half) { return packed(v[2 * half], v[2 * half + 1]); }
    static __m256i in_order(__m256i bytes) { return _mm256_permute4x64_epi64(bytes, 0xd8); }
    template <int M>
    static constexpr bool kQuads = M >= 8;
    // Of four registers: lanes 0 .. 3 of the first hold the first lane of each, lanes 4 .. 7 the second, and so on in
    // every 16 bytes.
    static void transpose(const __m256i* v, __m256i* to) {
        const __m256i a = _mm256_unpacklo_epi16(v[0], v[1]), b = _mm256_unpackhi_epi16(v[0], v[1]);
        const __m256i c = _mm256_unpacklo_epi16(v[2], v[3]), d = _mm256_unpackhi_epi16(v[2], v[3]);
        to[0] = _mm256_unpacklo_epi32(a, c);
        to[1] = _mm256_unpackhi_epi32(a, c);
        to[2] = _mm256_unpacklo_epi32(b, d);
        to[3] = _mm256_unpackhi_epi32(b, d);
    }
    // Lane I of 16 bytes in all of them.
    template <int I>
    static __m256i broadcast(__m256i v) {
        return _mm256_shuffle_epi8(v, _mm256_set1_epi16(0x0100 + 0x0202 * I));
    }
    // Pairs of neighbours exchanged within groups of four: 1, 2 or 3 = both.
    template <int By>
    static __m256i crossed(__m256i v) {
        constexpr int order = By == 1 ? 0xb1 : By == 2 ? 0x4e : 0x1b;
        return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, order), order);
    }
    static __m256i spread(uint64_t bits) {  // all ones in lane i where bit i is set
        const __m256i one = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, int16_t(0x8000));
        return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(int16_t(bits)), one), one);
    }
};

template <>
struct Lanes<float> {
    using Lane = int32_t;
    static __m256i keys(const float* w) {
        return _mm256_min_epi32(_mm256_and_si256(load256(w), _mm256_set1_epi32(0x7fffffff)), _mm256_set1_epi32(int32_t(Key<float>::nan)));
    }
    static __m256i above(__m256i a, __m256i b) { return _mm256_cmpgt_epi32(a, b); }
    static __m256i equal(__m256i a, __m256i b) { return _mm256_cmpeq_epi32(a, b); }
    static __m256i max(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
    static __m256i min(__m256i a, __m256i b) { return _mm256_min_epi32(a, b); }
    template <int Size>
    static __m256i across(__m256i v) {
        return exchange<4 * Size>(v);
    }
    static __m256i plus(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
    template <int M>
    static constexpr bool kQuads = M >= 4;
    static void transpose(const __m256i* v, __m256i* to) {
        const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
        const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
        to[0] = _mm256_unpacklo_epi64(a, c);
        to[1] = _mm256_unpackhi_epi64(a, c);
        to[2] = _mm256_unpacklo_epi64(b, d);
        to[3] = _mm256_unpackhi_epi64(b, d);
    }
    template <int I>
    static __m256i broadcast(__m256i v) {
        return _mm256_shuffle_epi32(v, 0x55 * I);
    }
    static __m256i bytes(const __m256i* v, int half) { return packed(v[4 * half], v[4 * half + 1], v[4 * half + 2], v[4 * half + 3]); }
    static __m256i in_order(__m256i bytes) {
        return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
    template <int By>
    static __m256i crossed(__m256i v) {
        return _mm256_shuffle_epi32(v, By == 1 ? 0xb1 : By == 2 ? 0x4e : 0x1b);
    }
    static __m256i spread(uint64_t bits) {
        const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), one), one);
    }
};

// Which of 64 elements are kept: no bit of a lane; all bits where it is dropped.
template <class T>
struct Kept64 {
    static constexpr int kLanes = 32 / sizeof(T), kVectors = 2 * sizeof(T);
    using L = Lanes<T>;

    __m256i dropped[kVectors];

    static Kept64 of(uint64_t bits) {
        Kept64 k;
        for (int i = 0; i < kVectors; ++i) k.dropped[i] = L::spread(~bits >> (i * kLanes));
        return k;
    }

    uint64_t bits() const { return ~lane_bits<T>(dropped); }
    int count() const { return 64 - __builtin_popcountll(byte_bits(L::bytes(dropped, 0), L::bytes(dropped, 1))); }

    // out[i] = whether i is kept.
    void flags(uint8_t* out) const {
        for (int i = 0; i < 2; ++i) {
            const __m256i one = _mm256_andnot_si256(L::in_order(L::bytes(dropped, i)), _mm256_set1_epi8(1));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * i), one);
        }
    }

    // out[i] = w[i] where it is kept, +0.0 elsewhere.
    void pick(const T* w, T* out) const {
        for (int i = 0; i < kVectors; ++i) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * kLanes), _mm256_andnot_si256(dropped[i], load256(w + i * kLanes)));
        }
    }
};

template <class T>
struct Keys64 {
    static constexpr int kLanes = 32 / sizeof(T), kVectors = 2 * sizeof(T);
    static constexpr int kRankable = 8;  // the largest group that `beaten` serves
    static constexpr bool kExact = false;   // two_of_four() is faster than nth()
    using L = Lanes<T>;

    __m256i v[kVectors];

    static Keys64 of(const T* w) {
        Keys64 k;
        for (int i = 0; i < kVectors; ++i) k.v[i] = L::keys(w + i * kLanes);
        return k;
    }

    // Bit i: the element `By` further on in the group of i, past its end from its start again, ranks above i.
    template <int M, int By>
    uint64_t beaten() const {
        static constexpr auto tie = [](int i) { return i % M >= M - By ? -1 : 0; };  // the other has the lower index: it wins ties
        static constexpr Table<typename L::Lane, decltype(tie)> handicap(tie);
        __m256i found[kVectors];
        for (int i = 0; i < kVectors; ++i) found[i] = L::above(rotated<M, By>(v[i]), L::plus(v[i], handicap.load()));
        return lane_bits<T>(found);
    }

    // The two largest of every four, ties to the lower index. The larger of its pair is dropped if the smaller of the other
    // pair is larger still, the smaller of its pair if the larger of the other is. Handicaps decide ties.
    Kept64<T> two_of_four() const {
        static constexpr auto odd = [](int i) { return i % 2 ? -1 : 0; };  // the other has the lower index: it wins ties
        static constexpr auto late = [](int i) { return i % 4 > 1 ? -1 : 0; };
        static constexpr Table<typename L::Lane, decltype(odd)> if_odd(odd);
        static constexpr Table<typename L::Lane, decltype(late)> if_late(late);
        Kept64<T> kept;
        for (int i = 0; i < kVectors; ++i) {
            const __m256i other = L::template crossed<1>(v[i]), smaller = L::above(other, L::plus(v[i], if_odd.load()));
            const __m256i low = L::template crossed<2>(L::min(v[i], other)), high = L::template crossed<2>(L::max(v[i], other));
            kept.dropped[i] = L::above(_mm256_blendv_epi8(low, high, smaller), L::plus(v[i], if_late.load()));
        }
        return kept;
    }

    // Those that are not below the Rank-th largest of their group: Rank of them, or more where there are ties.
    template <int M, int Rank>
    Kept64<T> not_below() const {
        Kept64<T> kept;
        each_nth<M, Rank>([&](int i, __m256i least) { kept.dropped[i] = L::above(least, v[i]); });
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
        each_nth<M, Rank>([&](int i, __m256i nth) { k.v[i] = nth; });
        return k;
    }

    uint64_t equal(const Keys64& other) const {
        __m256i found[kVectors];
        for (int i = 0; i < kVectors; ++i) found[i] = L::equal(v[i], other.v[i]);
        return lane_bits<T>(found);
    }

    // These elements rank below all others from now on.
    void remove(uint64_t bits) {
        for (int i = 0; i < kVectors; ++i) v[i] = _mm256_or_si256(v[i], L::spread(bits >> (i * kLanes)));
    }

  private:
    // f(i, the Rank-th largest of each group in the i-th register)
    template <int M, int Rank, class F>
    void each_nth(const F& f) const {
        if constexpr (L::template kQuads<M>) {
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; i += 4) {
                const __m256i found = nth_of_quad<L, M, Rank>(v + i);
                f(i, L::template broadcast<0>(found));
                f(i + 1, L::template broadcast<1>(found));
                f(i + 2, L::template broadcast<2>(found));
                f(i + 3, L::template broadcast<3>(found));
            }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) f(i, nth_of_group<L, M, Rank>(v[i]));
        }
    }

    template <int M, int By>
    static __m256i rotated(__m256i v) {
        if constexpr (M * sizeof(T) == 16) {
            return _mm256_alignr_epi8(v, v, By * int(sizeof(T)));
        } else if constexpr (M * sizeof(T) < 16) {
            static constexpr auto from = [](int b) {
                const int i = b % 16 / int(sizeof(T));
                return (i / M * M + (i + By) % M) * int(sizeof(T)) + b % int(sizeof(T));
            };
            static constexpr Table<int8_t, decltype(from)> bytes(from);
            return _mm256_shuffle_epi8(v, bytes.load());
        } else {
            static constexpr auto from = [](int i) { return (i + By) % M; };
            static constexpr Table<int32_t, decltype(from)> lanes(from);
            return _mm256_permutevar8x32_epi32(v, lanes.load());
        }
    }

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
