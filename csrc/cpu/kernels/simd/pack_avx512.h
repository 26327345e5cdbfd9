// From 64 bits to 64 elements and back with AVX-512. Without VBMI2 narrow elements are compressed and expanded as 32 bits.
// Compressing goes through a register: straight to memory it is microcoded on Zen 4 and 5.
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

// The elements of the set bits, one after another; returns where the next go. May write up to 64 in all.
template <class T>
T* gather64(const T* w, uint64_t bits, T* out) {
#if defined(__AVX512VBMI2__)
    if constexpr (sizeof(T) == 1) {
        _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(bits, _mm512_loadu_si512(w)));
        return out + _mm_popcnt_u64(bits);
    } else if constexpr (sizeof(T) == 2) {
        for (int i = 0; i < 64; i += 32) {
            const __mmask32 lanes = __mmask32(bits >> i);
            _mm512_storeu_si512(out, _mm512_maskz_compress_epi16(lanes, _mm512_loadu_si512(w + i)));
            out += _mm_popcnt_u32(lanes);
        }
        return out;
    }
#endif
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
#if defined(__AVX512VBMI2__)
    if constexpr (sizeof(T) == 2) {
        for (int i = 0; i < 64; i += 32) {
            const __mmask32 lanes = __mmask32(bits >> i);
            _mm512_storeu_si512(out + i, _mm512_maskz_expand_epi16(lanes, _mm512_loadu_si512(values)));
            values += _mm_popcnt_u32(lanes);
        }
        return values;
    }
#endif
    for (int i = 0; i < 64; i += 16) {
        const __mmask16 lanes = __mmask16(bits >> i);
        store16(_mm512_maskz_expand_epi32(lanes, load16(values)), out + i);
        values += _mm_popcnt_u32(lanes);
    }
    return values;
}

}  // namespace
}  // namespace nm

#endif
