// From 64 bits to 64 elements and back with AVX-512. Without VBMI2 all elements are compressed and expanded as
// 32 bits, in registers: straight to memory it is microcoded on Zen 4 and 5.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include "../../../core/types.h"

namespace nm {
namespace {

// Sixteen elements as 32-bit lanes.
inline __m512i load16(const float* w) { return _mm512_loadu_si512(w); }
inline __m512i load16(const uint8_t* w) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w))); }
template <class T>
__m512i load16(const T* w) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
}

inline void store16(__m512i x, float* out) { _mm512_storeu_si512(out, x); }
inline void store16(__m512i x, uint8_t* out) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(x)); }
template <class T>
void store16(__m512i x, T* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(x));
}

// Bit i: flags[i] is not 0.
inline uint64_t bits_of(const uint8_t* flags) {
    const __m512i x = _mm512_loadu_si512(flags);
    return _mm512_test_epi8_mask(x, x);
}

// flags[i] = bit i.
inline void flags_of(uint64_t bits, uint8_t* flags) { _mm512_storeu_si512(flags, _mm512_maskz_set1_epi8(bits, 1)); }

// out[i] = w[i] where bit i is set, +0.0 elsewhere.
inline void pick64(const float* w, uint64_t bits, float* out) {
    for (int i = 0; i < 64; i += 16) _mm512_storeu_ps(out + i, _mm512_maskz_loadu_ps(__mmask16(bits >> i), w + i));
}

template <class T>
void pick64(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 32) _mm512_storeu_si512(out + i, _mm512_maskz_loadu_epi16(__mmask32(bits >> i), w + i));
}

#if defined(__AVX512VBMI2__)

// Sixteen (fp32) or 32 of 64 elements in registers, by number.
struct Pool32 {
    __m512i v[4];
    explicit Pool32(const float* w) {
        for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_si512(w + 16 * i);
    }
    __m512i at(const uint8_t* numbers, uint64_t lanes) const {
        const __m512i from = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
        const __mmask16 upper = _mm512_test_epi32_mask(from, _mm512_set1_epi32(32));
        const __m512i low = _mm512_permutex2var_epi32(v[0], from, v[1]);
        return _mm512_maskz_mov_epi32(__mmask16(lanes), _mm512_mask_mov_epi32(low, upper, _mm512_permutex2var_epi32(v[2], from, v[3])));
    }
};

struct Pool16 {
    __m512i v[2];
    template <class T>
    explicit Pool16(const T* w) : v{_mm512_loadu_si512(w), _mm512_loadu_si512(w + 32)} {}
    __m512i at(const uint8_t* numbers, uint64_t lanes) const {
        const __m512i from = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)));
        return _mm512_maskz_permutex2var_epi16(__mmask32(lanes), v[0], from, v[1]);
    }
};

inline Pool32 pool_of(const float* w) { return Pool32(w); }
template <class T>
Pool16 pool_of(const T* w) {
    return Pool16(w);
}

inline __m512i numbers_0_to_63() {
    alignas(64) static constexpr auto numbers = [] {
        struct { uint8_t number[64]; } all{};
        for (int i = 0; i < 64; ++i) all.number[i] = uint8_t(i);
        return all;
    }();
    return _mm512_load_si512(numbers.number);
}

// The elements of the set bits, one after another; returns where the next go. May write up to 64 in all. One compression
// of the elements' numbers, then shuffles: compressing the elements themselves takes twice as long (Zen 5, 2026-11-21).
template <class T>
T* gather64(const T* w, uint64_t bits, T* out) {
    const int count = int(_mm_popcnt_u64(bits));
    const __m512i chosen = _mm512_maskz_compress_epi8(bits, numbers_0_to_63());
    constexpr int lanes = 64 / sizeof(T);
    const auto pool = pool_of(w);
    alignas(64) uint8_t numbers[64];
    _mm512_store_si512(numbers, chosen);
    for (int i = 0; i < count; i += lanes) _mm512_storeu_si512(out + i, pool.at(numbers + i, ~uint64_t(0)));
    return out + count;
}

inline uint8_t* gather64(const uint8_t* w, uint64_t bits, uint8_t* out) {
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(bits, _mm512_loadu_si512(w)));
    return out + _mm_popcnt_u64(bits);
}

// The inverse: out[i] = the next value where bit i is set, +0.0 elsewhere. Returns the value after them.
// Reads up to 64 values past the last.
template <class T>
const T* scatter64(const T* values, uint64_t bits, T* out) {
    constexpr int lanes = 64 / sizeof(T);
    const auto pool = pool_of(values);
    alignas(64) uint8_t numbers[64];
    _mm512_store_si512(numbers, _mm512_maskz_expand_epi8(bits, numbers_0_to_63()));
    for (int i = 0; i < 64; i += lanes) _mm512_storeu_si512(out + i, pool.at(numbers + i, bits >> i));
    return values + _mm_popcnt_u64(bits);
}

#else

// The elements of the set bits, one after another; returns where the next go. May write up to 64 in all.
template <class T>
T* gather64(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 16) {
        const __mmask16 lanes = __mmask16(bits >> i);
        store16(_mm512_maskz_compress_epi32(lanes, load16(w + i)), out);
        out += _mm_popcnt_u32(lanes);
    }
    return out;
}

// The inverse: out[i] = the next value where bit i is set, +0.0 elsewhere. Returns the value after them.
// Reads up to 64 values past the last.
template <class T>
const T* scatter64(const T* values, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 16) {
        const __mmask16 lanes = __mmask16(bits >> i);
        store16(_mm512_maskz_expand_epi32(lanes, load16(values)), out + i);
        values += _mm_popcnt_u32(lanes);
    }
    return values;
}

#endif

// The same where every eight bits have Count set.
constexpr bool kGatherBytes = false;  // faster than gather64 and pack_positions

template <int, class T>
void gather_bytes(const T* w, uint64_t bits, T* out) {
    gather64(w, bits, out);
}

}  // namespace
}  // namespace nm

#endif
