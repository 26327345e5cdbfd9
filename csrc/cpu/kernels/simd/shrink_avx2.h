// Soft thresholds of 64 elements, each with its own, and 64 elements as fp32, with AVX2; arithmetic as in core/threshold.h.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include "select_avx2.h"

namespace nm {
namespace {

inline __m128i half_of(__m256i v, int i) { return i ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v); }

template <class T>
__m256 widened(__m128i x);
template <>
inline __m256 widened<bf16>(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
template <>
inline __m256 widened<fp16>(__m128i x) {
    return _mm256_cvtph_ps(x);
}

template <class T>
__m128i narrowed(__m256 x);
template <>
inline __m128i narrowed<bf16>(__m256 x) {
    const __m256i b = _mm256_castps_si256(x), top = _mm256_srli_epi32(b, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i r = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
template <>
inline __m128i narrowed<fp16>(__m256 x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline __m256 shrunk(__m256 x, __m256 t) {
    const __m256 sign = _mm256_set1_ps(-0.0f), d = _mm256_sub_ps(_mm256_andnot_ps(sign, x), t);
    const __m256 signed_d = _mm256_or_ps(_mm256_andnot_ps(sign, d), _mm256_and_ps(sign, x));
    return _mm256_and_ps(_mm256_cmp_ps(d, _mm256_setzero_ps(), _CMP_NLE_UQ), signed_d);
}

inline void shrink64(const float* w, const Keys64<float>& t, float* out) {
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(out + 8 * i, shrunk(_mm256_loadu_ps(w + 8 * i), _mm256_castsi256_ps(t.v[i])));
}

template <class T>
void shrink64(const T* w, const Keys64<T>& t, T* out) {
    for (int i = 0; i < 8; ++i) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 8 * i));
        const __m256 s = shrunk(widened<T>(x), widened<T>(half_of(t.v[i / 2], i % 2)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8 * i), narrowed<T>(s));
    }
}

inline void widen64(const float* w, float* out) {
    for (int i = 0; i < 64; i += 8) _mm256_storeu_ps(out + i, _mm256_loadu_ps(w + i));
}

template <class T>
void widen64(const T* w, float* out) {
    for (int i = 0; i < 64; i += 8) _mm256_storeu_ps(out + i, widened<T>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + i))));
}

// Sums of products of fp32 numbers, exact before they are added: element i goes to lane i % 16.
class Dot {
  public:
    void add64(const float* a, const float* b) {
        for (int i = 0; i < 64; i += 4) {
            const __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(a + i)), y = _mm256_cvtps_pd(_mm_loadu_ps(b + i));
            sum_[i / 4 % 4] = _mm256_add_pd(sum_[i / 4 % 4], _mm256_mul_pd(x, y));
        }
    }
    void lanes(double* out) const {
        for (int i = 0; i < 4; ++i) _mm256_storeu_pd(out + 4 * i, sum_[i]);
    }

  private:
    __m256d sum_[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
};

}  // namespace
}  // namespace nm

#endif
