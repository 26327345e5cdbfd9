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
    if constexpr (Bytes == 16) return _mm256_permute4x64_epi64(v, 0x4e);
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

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

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
    static uint64_t bits(const __m256i* v) {
        uint64_t found = 0;
        for (int i = 0; i < 2; ++i) {
            const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(v[2 * i], v[2 * i + 1]), 0xd8);
            found |= uint64_t(uint32_t(_mm256_movemask_epi8(bytes))) << (32 * i);
        }
        return found;
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
    static uint64_t bits(const __m256i* v) {
        uint64_t found = 0;
        for (int i = 0; i < 8; ++i) found |= uint64_t(uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(v[i])))) << (8 * i);
        return found;
    }
    static __m256i spread(uint64_t bits) {
        const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), one), one);
    }
};

template <class T>
struct Keys64 {
    static constexpr int kLanes = 32 / sizeof(T), kVectors = 2 * sizeof(T);
    static constexpr int kRankable = 8;  // the largest group that `beaten` serves
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
        return L::bits(found);
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
        for (int i = 0; i < kVectors; ++i) k.v[i] = nth_of_group<L, M, Rank>(v[i]);
        return k;
    }

    uint64_t equal(const Keys64& other) const {
        __m256i found[kVectors];
        for (int i = 0; i < kVectors; ++i) found[i] = L::equal(v[i], other.v[i]);
        return L::bits(found);
    }

    // These elements rank below all others from now on.
    void remove(uint64_t bits) {
        for (int i = 0; i < kVectors; ++i) v[i] = _mm256_or_si256(v[i], L::spread(bits >> (i * kLanes)));
    }

  private:
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
