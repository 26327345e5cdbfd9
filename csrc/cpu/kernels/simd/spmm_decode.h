// positions(): the indices of kLanes stored weights, one in each 32-bit lane.
#pragma once

#include <cstring>

#include "../../../core/bitpack.h"
#include "spmm_vector.h"

namespace nm {
namespace {

template <class Word>
inline Word word_at(const uint8_t* bytes) {
    Word word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

#if defined(__AVX512F__)

struct Lanes {
    __m512i x;
};

template <int Bits>
inline Lanes positions(const uint8_t* indices) {
    if (Bits == 8) return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(indices)))};
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (Bits == 2) {
        const __m512i all = _mm512_set1_epi32(int(word_at<uint32_t>(indices)));
        return {_mm512_and_si512(_mm512_srlv_epi32(all, _mm512_slli_epi32(lane, 1)), _mm512_set1_epi32(3))};
    }
    const __m512i low = _mm512_set1_epi32(int(word_at<uint32_t>(indices)));
    const __m512i both = _mm512_mask_set1_epi32(low, 0xff00, int(word_at<uint32_t>(indices + 4)));
    const __m512i shift = _mm512_and_si512(_mm512_slli_epi32(lane, 2), _mm512_set1_epi32(31));
    return {_mm512_and_si512(_mm512_srlv_epi32(both, shift), _mm512_set1_epi32(15))};
}

inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_epu32(a.x, b.x)}; }
inline Lanes none() { return {_mm512_setzero_si512()}; }
inline int largest(Lanes a) { return int(_mm512_reduce_max_epu32(a.x)); }

// first[i] + min(p, last) * step
inline void put_offsets(Lanes p, uint32_t last, uint32_t step, const uint32_t* first, uint32_t* to) {
    const __m512i inside = _mm512_min_epu32(p.x, _mm512_set1_epi32(int(last)));
    const __m512i product = _mm512_mullo_epi32(inside, _mm512_set1_epi32(int(step)));
    _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_loadu_si512(first), product));
}

#elif defined(__AVX2__)

struct Lanes {
    __m256i x;
};

template <int Bits>
inline Lanes positions(const uint8_t* indices) {
    if (Bits == 8) return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(indices)))};
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const uint32_t word = Bits == 2 ? word_at<uint16_t>(indices) : word_at<uint32_t>(indices);
    const __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(int(word)), _mm256_slli_epi32(lane, Bits / 2));
    return {_mm256_and_si256(shifted, _mm256_set1_epi32((1 << Bits) - 1))};
}

inline Lanes larger(Lanes a, Lanes b) { return {_mm256_max_epu32(a.x, b.x)}; }
inline Lanes none() { return {_mm256_setzero_si256()}; }
inline int largest(Lanes a) {
    alignas(32) uint32_t lane[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane), a.x);
    uint32_t most = 0;
    for (const uint32_t x : lane) most = x > most ? x : most;
    return int(most);
}

inline void put_offsets(Lanes p, uint32_t last, uint32_t step, const uint32_t* first, uint32_t* to) {
    const __m256i inside = _mm256_min_epu32(p.x, _mm256_set1_epi32(int(last)));
    const __m256i product = _mm256_mullo_epi32(inside, _mm256_set1_epi32(int(step)));
    const __m256i start = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_add_epi32(start, product));
}

#else

struct Lanes {
    uint32_t x[kLanes];
};

template <int Bits>
inline Lanes positions(const uint8_t* indices) {
    Lanes p;
    for (int i = 0; i < kLanes; ++i) p.x[i] = uint32_t(get_index(indices, i, Bits));
    return p;
}

inline Lanes larger(Lanes a, const Lanes& b) {
    for (int i = 0; i < kLanes; ++i) a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i];
    return a;
}
inline Lanes none() { return {}; }
inline int largest(const Lanes& a) {
    uint32_t most = 0;
    for (const uint32_t x : a.x) most = x > most ? x : most;
    return int(most);
}

inline void put_offsets(const Lanes& p, uint32_t last, uint32_t step, const uint32_t* first, uint32_t* to) {
    for (int i = 0; i < kLanes; ++i) to[i] = first[i] + (p.x[i] < last ? p.x[i] : last) * step;
}

#endif

}  // namespace
}  // namespace nm
