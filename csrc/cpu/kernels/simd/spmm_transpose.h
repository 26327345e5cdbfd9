// transpose(): a block of kLanes x kLanes fp32 numbers, transposed in registers.
#pragma once

#include "spmm_vector.h"

namespace nm {
namespace {

// to[j * to_row + i] = from[i * from_row + j] for i, j < kLanes
#if defined(__AVX512F__)

inline void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
    __m512 r[16], s[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(from + i * from_row);
    // 4 x 4 inside each 128-bit lane: s[4q + j] holds columns j, j+4, j+8, j+12 of rows 4q .. 4q+3
    for (int q = 0; q < 16; q += 4) {
        const __m512 a = _mm512_unpacklo_ps(r[q], r[q + 1]), b = _mm512_unpackhi_ps(r[q], r[q + 1]);
        const __m512 c = _mm512_unpacklo_ps(r[q + 2], r[q + 3]), d = _mm512_unpackhi_ps(r[q + 2], r[q + 3]);
        s[q] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
        s[q + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
        s[q + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
        s[q + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
    }
    // then the lanes themselves are a 4 x 4 matrix for each j
    for (int j = 0; j < 4; ++j) {
        const __m512 a = _mm512_shuffle_f32x4(s[j], s[4 + j], 0x88), b = _mm512_shuffle_f32x4(s[8 + j], s[12 + j], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(s[j], s[4 + j], 0xdd), d = _mm512_shuffle_f32x4(s[8 + j], s[12 + j], 0xdd);
        _mm512_storeu_ps(to + j * to_row, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(to + (4 + j) * to_row, _mm512_shuffle_f32x4(c, d, 0x88));
        _mm512_storeu_ps(to + (8 + j) * to_row, _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_storeu_ps(to + (12 + j) * to_row, _mm512_shuffle_f32x4(c, d, 0xdd));
    }
}

#elif defined(__AVX2__)

// Eight registers as the rows of a matrix.
inline void transpose8(__m256 (&r)[8]) {
    __m256 s[8];
    for (int q = 0; q < 8; q += 4) {
        const __m256 a = _mm256_unpacklo_ps(r[q], r[q + 1]), b = _mm256_unpackhi_ps(r[q], r[q + 1]);
        const __m256 c = _mm256_unpacklo_ps(r[q + 2], r[q + 3]), d = _mm256_unpackhi_ps(r[q + 2], r[q + 3]);
        s[q] = _mm256_shuffle_ps(a, c, 0x44);
        s[q + 1] = _mm256_shuffle_ps(a, c, 0xee);
        s[q + 2] = _mm256_shuffle_ps(b, d, 0x44);
        s[q + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int j = 0; j < 4; ++j) {
        r[j] = _mm256_permute2f128_ps(s[j], s[4 + j], 0x20);
        r[4 + j] = _mm256_permute2f128_ps(s[j], s[4 + j], 0x31);
    }
}

inline void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
    __m256 r[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * from_row);
    transpose8(r);
    for (int j = 0; j < 8; ++j) _mm256_storeu_ps(to + j * to_row, r[j]);
}

#else

inline void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
    for (int j = 0; j < kLanes; ++j) {
        for (int i = 0; i < kLanes; ++i) to[j * to_row + i] = from[i * from_row + j];
    }
}

#endif

}  // namespace
}  // namespace nm
