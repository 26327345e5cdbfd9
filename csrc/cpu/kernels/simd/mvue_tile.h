// kLanes x kLanes tiles between rows of a tensor (any element type) and vectors of one element of each of kLanes rows.
#pragma once

#include <algorithm>

#include "../../../core/types.h"
#include "mvue_lanes.h"

namespace nm {
namespace {

// kLanes neighbouring elements as floats.
NM_INLINE F widened(const float* from) { return load(from); }

NM_INLINE F widened(const bf16* from) {
#if defined(NM_MASK_REGISTERS)
    return float_of(U(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))) << 16);
#elif defined(__AVX2__)
    return float_of(U(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))) << 16);
#else
    F x;
    for (int l = 0; l < kLanes; ++l) x[l] = to_float(from[l]);
    return x;
#endif
}

NM_INLINE F widened(const fp16* from) {
#if defined(NM_MASK_REGISTERS)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    F x;
    for (int l = 0; l < kLanes; ++l) x[l] = to_float(from[l]);
    return x;
#endif
}

// The first `count` of them, then zeros.
template <class T>
NM_INLINE F widened(const T* from, int64_t count) {
    if (count >= kLanes) return widened(from);
    T some[kLanes] = {};
    for (int64_t l = 0; l < count; ++l) some[l] = from[l];
    return widened(some);
}

// Floats as the bits of a T in the lower half of each lane, as from_float rounds; a NaN only as bits_float(0x7fc00000).
template <class T>
NM_INLINE U narrowed(F x);

template <>
NM_INLINE U narrowed<float>(F x) {
    return bits_of(x);
}

template <>
NM_INLINE U narrowed<bf16>(F x) {
    const U b = bits_of(x);
    return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}

template <>
NM_INLINE U narrowed<fp16>(F x) {
#if defined(NM_MASK_REGISTERS)
    return U(_mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)));
#elif defined(__AVX2__)
    return U(_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)));
#else
    U h;
    for (int l = 0; l < kLanes; ++l) h[l] = from_float<fp16>(x[l]).bits;
    return h;
#endif
}

// kLanes floats as neighbouring elements.
template <class T>
NM_INLINE void store_narrowed(T* to, F x) {
    const U b = narrowed<T>(x);
    if constexpr (sizeof(T) == 4) {
        std::memcpy(to, &b, sizeof b);
    } else {
#if defined(NM_MASK_REGISTERS)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(__m512i(b)));
#elif defined(__AVX2__)
        const __m256i twice = _mm256_packus_epi32(__m256i(b), __m256i(b));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0x08)));
#else
        for (int l = 0; l < kLanes; ++l) to[l].bits = uint16_t(b[l]);
#endif
    }
}

#if defined(__AVX2__) && !defined(NM_MASK_REGISTERS)
// r[i] lane j <-> r[j] lane i of four registers, in each half.
NM_INLINE void transpose_halves(U* r) {
    const __m256i a = _mm256_unpacklo_epi32(__m256i(r[0]), __m256i(r[1])), b = _mm256_unpackhi_epi32(__m256i(r[0]), __m256i(r[1]));
    const __m256i c = _mm256_unpacklo_epi32(__m256i(r[2]), __m256i(r[3])), d = _mm256_unpackhi_epi32(__m256i(r[2]), __m256i(r[3]));
    r[0] = U(_mm256_unpacklo_epi64(a, c));
    r[1] = U(_mm256_unpackhi_epi64(a, c));
    r[2] = U(_mm256_unpacklo_epi64(b, d));
    r[3] = U(_mm256_unpackhi_epi64(b, d));
}
#endif

// r[i] lane j <-> r[j] lane i
NM_INLINE void transpose(U* r) {
#if defined(NM_MASK_REGISTERS)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(__m512i(r[i]), __m512i(r[i + 1]));
        a[i + 1] = _mm512_unpackhi_epi32(__m512i(r[i]), __m512i(r[i + 1]));
    }
    for (int i = 0; i < 16; i += 4) {  // then b[i + k], 128-bit part q: column 4q + k of rows i .. i + 3
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int k = 0; k < 4; ++k) {
        const __m512i low01 = _mm512_shuffle_i32x4(b[k], b[k + 4], 0x44), high01 = _mm512_shuffle_i32x4(b[k], b[k + 4], 0xee);
        const __m512i low23 = _mm512_shuffle_i32x4(b[k + 8], b[k + 12], 0x44), high23 = _mm512_shuffle_i32x4(b[k + 8], b[k + 12], 0xee);
        r[k] = U(_mm512_shuffle_i32x4(low01, low23, 0x88));
        r[k + 4] = U(_mm512_shuffle_i32x4(low01, low23, 0xdd));
        r[k + 8] = U(_mm512_shuffle_i32x4(high01, high23, 0x88));
        r[k + 12] = U(_mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
#elif defined(__AVX2__)
    for (int k = 0; k < 4; ++k) {
        const __m256i low = __m256i(r[k]), high = __m256i(r[k + 4]);
        r[k] = U(_mm256_permute2x128_si256(low, high, 0x20));
        r[k + 4] = U(_mm256_permute2x128_si256(low, high, 0x31));
    }
    transpose_halves(r);
    transpose_halves(r + 4);
#else
    uint32_t t[kLanes][kLanes], in[kLanes][kLanes];
    std::memcpy(in, r, sizeof in);
    for (int i = 0; i < kLanes; ++i) {
        for (int j = 0; j < kLanes; ++j) t[i][j] = in[j][i];
    }
    std::memcpy(r, t, sizeof t);
#endif
}

// r[i] lane j = word i of row j, rows `stride` bytes apart. A half loaded to where it belongs costs less than an exchange.
NM_INLINE void load_transposed(const char* rows, int64_t stride, U* r) {
#if defined(__AVX2__) && !defined(NM_MASK_REGISTERS)
    const auto half = [&](int row, int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * stride) + i); };
    for (int i = 0; i < 2; ++i) {
        for (int k = 0; k < 4; ++k) r[4 * i + k] = U(_mm256_inserti128_si256(_mm256_castsi128_si256(half(k, i)), half(k + 4, i), 1));
        transpose_halves(r + 4 * i);
    }
#else
    // straight into memory the compiler copies halves, and reading them whole stalls
    NM_UNROLL_16 for (int l = 0; l < kLanes; ++l) {
        U words;
        std::memcpy(&words, rows + l * stride, sizeof words);
        r[l] = words;
    }
    transpose(r);
#endif
}

// Past the caches (see stream.h): a whole aligned vector leaves without its line being read first.
template <bool Stream>
NM_INLINE void store_words(char* to, U words) {
    if constexpr (Stream) {
#if defined(NM_MASK_REGISTERS)
        return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), __m512i(words));
#elif defined(__AVX2__)
        return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), __m256i(words));
#elif defined(__SSE2__)
        return _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(words));
#endif
    }
    std::memcpy(to, &words, sizeof words);
}

// `bytes` bytes to each of `lanes` rows, `stride` bytes apart: 32-bit word i of row l is lane l of words(i), and
// words.transposed(i, r) has words i .. i + kLanes of row l in r[l].
template <bool Stream, class W>
NM_INLINE void store_rows(const W& words, int64_t bytes, char* to, int64_t stride, int lanes) {
    for (int64_t done = 0; done < bytes; done += 4 * kLanes) {
        const int64_t there = std::min<int64_t>(bytes - done, 4 * kLanes);
        U r[kLanes];
        if (there == 4 * kLanes) {
            words.transposed(done / 4, r);
        } else {
            for (int i = 0; i < kLanes; ++i) r[i] = 4 * i < there ? words(done / 4 + i) : U{};
            transpose(r);
        }
        if (there == 4 * kLanes && lanes == kLanes) {
            NM_UNROLL_16 for (int l = 0; l < kLanes; ++l) store_words<Stream>(to + l * stride + done, r[l]);
        } else {
            for (int l = 0; l < std::min(lanes, kLanes); ++l) std::memcpy(to + l * stride + done, &r[l], size_t(there));
        }
    }
}

// Word i of a row of `count` elements of type T, whose element k is x[k * kLanes + lane].
template <class T>
struct RowWords {
    const float* x;
    int64_t count;

    NM_INLINE U operator()(int64_t i) const {
        if constexpr (sizeof(T) == 4) return bits_of(load(x + i * kLanes));
        const int64_t k = 2 * i;
        const U low = narrowed<T>(load(x + k * kLanes));
        return k + 1 < count ? low | narrowed<T>(load(x + (k + 1) * kLanes)) << 16 : low;
    }

    NM_INLINE void transposed(int64_t first, U* r) const {
        if constexpr (sizeof(T) == 4) {
            load_transposed(reinterpret_cast<const char*>(x + first * kLanes), sizeof(U), r);
        } else {
            NM_UNROLL_16 for (int i = 0; i < kLanes; ++i) r[i] = (*this)(first + i);
            transpose(r);
        }
    }
};

template <class T>
NM_INLINE void store_elements(const float* x, int64_t count, T* to, int64_t stride, int lanes, bool stream) {
    const int64_t bytes = count * int64_t(sizeof(T)), step = stride * int64_t(sizeof(T));
    char* first = reinterpret_cast<char*>(to);
    if (stream && (reinterpret_cast<uintptr_t>(first) | uintptr_t(step)) % sizeof(U) == 0) {
        store_rows<true>(RowWords<T>{x, count}, bytes, first, step, lanes);
    } else {
        store_rows<false>(RowWords<T>{x, count}, bytes, first, step, lanes);
    }
}

// 32 bits of each of kLanes rows as floats: one element, or the lower and the upper of two.
NM_INLINE void store_widened(U word, float* x, float) { store(x, float_of(word)); }

NM_INLINE void store_widened(U word, float* x, bf16) {
    store(x, float_of(word << 16));
    store(x + kLanes, float_of(word & 0xffff0000u));
}

NM_INLINE void store_widened(U word, float* x, fp16) {
#if defined(NM_MASK_REGISTERS)
    store(x, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(__m512i(word))));
    store(x + kLanes, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(__m512i(word >> 16))));
#elif defined(__AVX2__)
    // in each half four lower elements, then four upper ones
    const __m256i h = _mm256_packus_epi32(__m256i(word & 0xffffu), __m256i(word >> 16)), both = _mm256_permute4x64_epi64(h, 0xd8);
    store(x, _mm256_cvtph_ps(_mm256_castsi256_si128(both)));
    store(x + kLanes, _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1)));
#else
    fp16 h[2 * kLanes], low[kLanes], high[kLanes];
    std::memcpy(h, &word, sizeof word);
    for (int l = 0; l < kLanes; ++l) low[l] = h[2 * l], high[l] = h[2 * l + 1];
    store(x, widened(low));
    store(x + kLanes, widened(high));
#endif
}

// As many elements as fit a vector, zeros past the first `there`.
template <class T>
NM_INLINE U row_words(const T* from, int64_t there) {
    constexpr int64_t each = int64_t(sizeof(U) / sizeof(T));
    U words = {};
    std::memcpy(&words, from, there >= each ? sizeof words : size_t(std::max<int64_t>(there, 0)) * sizeof(T));
    return words;
}

// The other way: `count` elements of each of `lanes` rows, `stride` elements apart, to x. `there` >= count may be read
// from a row; x has room for count rounded up to what two vectors hold.
template <class T>
NM_INLINE void load_elements(const T* from, int64_t stride, int lanes, int64_t count, int64_t there, float* x) {
    constexpr int per = 4 / sizeof(T), each = per * kLanes;
    for (int64_t done = 0; done < count; done += each) {
        U r[kLanes];
        if (lanes == kLanes && there - done >= each) {
            load_transposed(reinterpret_cast<const char*>(from + done), stride * int64_t(sizeof(T)), r);
        } else {
            for (int l = 0; l < kLanes; ++l) r[l] = l < lanes ? row_words(from + l * stride + done, there - done) : U{};
            transpose(r);
        }
        NM_UNROLL_16 for (int i = 0; i < kLanes; ++i) store_widened(r[i], x + (done + i * per) * kLanes, T{});
    }
}

}  // namespace
}  // namespace nm
