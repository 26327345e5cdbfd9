// Soft thresholds of 64 elements, each with its own, and 64 elements as fp32, with AVX-512; arithmetic as in core/threshold.h.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include "select_avx512.h"

namespace nm {
namespace {

inline __m256i half_of(__m512i v, int i) { return i ? _mm512_extracti64x4_epi64(v, 1) : _mm512_castsi512_si256(v); }

template <class T>
__m512 widened(__m256i x);
template <>
inline __m512 widened<bf16>(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
template <>
inline __m512 widened<fp16>(__m256i x) {
    return _mm512_cvtph_ps(x);
}

template <class T>
__m256i narrowed(__m512 x);
template <>
inline __m256i narrowed<bf16>(__m512 x) {
    const __m512i b = _mm512_castps_si512(x), top = _mm512_srli_epi32(b, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet));
}
template <>
inline __m256i narrowed<fp16>(__m512 x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline __m512 shrunk(__m512 x, __m512 t) {
    const __m512 sign = _mm512_set1_ps(-0.0f), d = _mm512_sub_ps(_mm512_andnot_ps(sign, x), t);
    const __m512 signed_d = _mm512_or_ps(_mm512_andnot_ps(sign, d), _mm512_and_ps(sign, x));
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(d, _mm512_setzero_ps(), _CMP_NLE_UQ), signed_d);
}

inline void shrink64(const float* w, const Keys64<float>& t, float* out) {
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(out + 16 * i, shrunk(_mm512_loadu_ps(w + 16 * i), _mm512_castsi512_ps(t.v[i])));
}

template <class T>
void shrink64(const T* w, const Keys64<T>& t, T* out) {
    for (int i = 0; i < 4; ++i) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 16 * i));
        const __m512 s = shrunk(widened<T>(x), widened<T>(half_of(t.v[i / 2], i % 2)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * i), narrowed<T>(s));
    }
}

inline void widen64(const float* w, float* out) {
    for (int i = 0; i < 64; i += 16) _mm512_storeu_ps(out + i, _mm512_loadu_ps(w + i));
}

template <class T>
void widen64(const T* w, float* out) {
    for (int i = 0; i < 64; i += 16) _mm512_storeu_ps(out + i, widened<T>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i))));
}

// Sums of products of fp32 numbers, exact before they are added: element i goes to lane i % 16.
class Dot {
  public:
    void add64(const float* a, const float* b) {
        for (int i = 0; i < 64; i += 8) {
            const __m512d x = _mm512_cvtps_pd(_mm256_loadu_ps(a + i)), y = _mm512_cvtps_pd(_mm256_loadu_ps(b + i));
            sum_[i / 8 % 2] = _mm512_add_pd(sum_[i / 8 % 2], _mm512_mul_pd(x, y));
        }
    }
    void lanes(double* out) const {
        for (int i = 0; i < 2; ++i) _mm512_storeu_pd(out + 8 * i, sum_[i]);
    }

  private:
    __m512d sum_[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
};

}  // namespace
}  // namespace nm

#endif
