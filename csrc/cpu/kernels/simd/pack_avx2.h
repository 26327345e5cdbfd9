// From 64 bits to 64 elements and back with AVX2: eight bits at a time are the index of a table of shuffles.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include "../../../core/types.h"

namespace nm {
namespace {

// For each byte: the positions of its set bits (the rest 0), and for each bit how many set ones are below it.
struct ByteTables {
    uint8_t set[256][8], below[256][8];
    constexpr ByteTables() : set(), below() {
        for (int byte = 0; byte < 256; ++byte) {
            int count = 0;
            for (int i = 0; i < 8; ++i) {
                below[byte][i] = uint8_t(count);
                if ((byte >> i) & 1) set[byte][count++] = uint8_t(i);
            }
        }
    }
};

constexpr ByteTables kBytes;

inline __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }

// One element per chosen lane: eight elements by the lane numbers in the low eight bytes of `from`.
inline void shuffle8(const float* w, __m128i from, float* out) {
    _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(_mm256_loadu_ps(w), _mm256_cvtepu8_epi32(from)));
}

inline __m128i byte_pairs(__m128i from) {
    const __m128i even = _mm_add_epi8(from, from);
    return _mm_unpacklo_epi8(even, _mm_add_epi8(even, _mm_set1_epi8(1)));
}

// The same as bytes of 16-bit elements: one load for four instructions.
struct PairTable {
    alignas(16) uint8_t set[256][16];
    constexpr PairTable() : set() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int i = 0; i < 16; ++i) set[byte][i] = uint8_t(2 * kBytes.set[byte][i / 2] + i % 2);
        }
    }
};

constexpr PairTable kPairs;

template <class T>
void shuffle8(const T* w, __m128i from, T* out) {  // bf16 and fp16
    static_assert(sizeof(T) == 2);
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(x, byte_pairs(from)));
}

inline void shuffle8(const uint8_t* w, __m128i from, uint8_t* out) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(load64(w), from));
}

// All ones in lane i where bit i is set.
inline __m256i lanes32(uint64_t bits) {
    const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), one), one);
}

inline __m128i lanes16(uint64_t bits) {
    const __m128i one = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm_cmpeq_epi16(_mm_and_si128(_mm_set1_epi16(int16_t(bits)), one), one);
}

inline void pick8(const float* w, uint64_t bits, float* out) {
    _mm256_storeu_ps(out, _mm256_and_ps(_mm256_loadu_ps(w), _mm256_castsi256_ps(lanes32(bits))));
}

template <class T>
void pick8(const T* w, uint64_t bits, T* out) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_and_si128(x, lanes16(bits)));
}

// Bit i: flags[i] is not 0.
inline uint64_t bits_of(const uint8_t* flags) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; i += 32) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags + i));
        bits |= uint64_t(~uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256())))) << i;
    }
    return bits;
}

// flags[i] = bit i.
inline void flags_of(uint64_t bits, uint8_t* flags) {
    const __m256i byte = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
    for (int i = 0; i < 64; i += 32) {
        const __m256i x = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(bits >> i)), byte), bit);
        const __m256i one = _mm256_min_epu8(x, _mm256_set1_epi8(1));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(flags + i), one);
    }
}

// out[i] = w[i] where bit i is set, +0.0 elsewhere.
template <class T>
void pick64(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 8) pick8(w + i, bits >> i, out + i);
}

// The elements of the set bits, one after another; returns where the next go. May write up to 64 in all.
template <class T>
T* gather64(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 8) {
        const unsigned byte = (bits >> i) & 0xff;
        shuffle8(w + i, load64(kBytes.set[byte]), out);
        out += _mm_popcnt_u32(byte);
    }
    return out;
}

// The same where every eight bits have Count set.
constexpr bool kGatherBytes = true;  // faster than gather64 and pack_positions

template <int Count>
void gather_bytes(const float* w, uint64_t bits, float* out) {
    for (int i = 0; i < 8; ++i) shuffle8(w + 8 * i, load64(kBytes.set[bits >> (8 * i) & 0xff]), out + Count * i);
}

template <int Count, class T>
void gather_bytes(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 8; ++i) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 8 * i));
        const __m128i from = _mm_load_si128(reinterpret_cast<const __m128i*>(kPairs.set[bits >> (8 * i) & 0xff]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + Count * i), _mm_shuffle_epi8(x, from));
    }
}

// The inverse: out[i] = the next value where bit i is set, +0.0 elsewhere. Returns the value after them.
// Reads up to 64 values past the last.
template <class T>
const T* scatter64(const T* values, uint64_t bits, T* out) {
    for (int i = 0; i < 64; i += 8) {
        const unsigned byte = (bits >> i) & 0xff;
        shuffle8(values, load64(kBytes.below[byte]), out + i);
        pick8(out + i, byte, out + i);
        values += _mm_popcnt_u32(byte);
    }
    return values;
}

}  // namespace
}  // namespace nm

#endif
