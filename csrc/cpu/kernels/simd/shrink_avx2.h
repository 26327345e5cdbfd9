// Soft thresholds of 64 elements, each with its own, and their products with the weights, with AVX2; arithmetic as in
// core/threshold.h.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include "select_avx2.h"

namespace nm {
namespace {

// The larger of d and 0; d where it is NaN.
inline __m256 positive(__m256 d) { return _mm256_max_ps(_mm256_setzero_ps(), d); }

// Keys are magnitudes, so their difference needs no sign; it comes from the weight, but zeros are +0.0. inf - inf is a
// negative NaN in this arithmetic. Inlined, or keys and thresholds would pass through memory.
inline __attribute__((always_inline)) void shrink64(const float* w, const Keys64<float>& keys, const Keys64<float>& t, float* out) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m256 d = positive(_mm256_sub_ps(_mm256_castsi256_ps(keys.v[i]), _mm256_castsi256_ps(t.v[i])));
        const __m256 signed_d = _mm256_or_ps(_mm256_andnot_ps(sign, d), _mm256_and_ps(sign, _mm256_loadu_ps(w + 8 * i)));
        _mm256_storeu_ps(out + 8 * i, _mm256_and_ps(_mm256_cmp_ps(d, _mm256_setzero_ps(), _CMP_NEQ_UQ), signed_d));
    }
}

// Differences of 16 keys in fp32, rounded to nearest even; the sign bit counts for nothing.
template <class T>
__m256i difference(__m256i keys, __m256i t);

// A bf16 is the upper half of an fp32: elements with even and odd numbers are widened where they lie. Rounding in
// integers turns no NaN into a number here: theirs is 0x7fc10000 or 0xffc00000.
template <>
inline __m256i difference<bf16>(__m256i keys, __m256i t) {
    const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi32(1), half = _mm256_set1_epi32(0x7fff);
    const auto rounded = [&](__m256i a, __m256i b) {
        const __m256i d = _mm256_castps_si256(positive(_mm256_sub_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b))));
        return _mm256_add_epi32(_mm256_add_epi32(d, half), _mm256_and_si256(_mm256_srli_epi32(d, 16), one));
    };
    const __m256i even = rounded(_mm256_slli_epi32(keys, 16), _mm256_slli_epi32(t, 16));
    const __m256i odd = rounded(_mm256_blend_epi16(zero, keys, 0xaa), _mm256_blend_epi16(zero, t, 0xaa));
    return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
}

template <>
inline __m256i difference<fp16>(__m256i keys, __m256i t) {
    const auto half = [&](int i) {
        const __m128i a = i ? _mm256_extracti128_si256(keys, 1) : _mm256_castsi256_si128(keys);
        const __m128i b = i ? _mm256_extracti128_si256(t, 1) : _mm256_castsi256_si128(t);
        return _mm256_cvtps_ph(positive(_mm256_sub_ps(_mm256_cvtph_ps(a), _mm256_cvtph_ps(b))), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    };
    // the one NaN of core/types.h for all of them
    return _mm256_min_epu16(_mm256_set_m128i(half(1), half(0)), _mm256_set1_epi16(0x7e00));
}

template <class T>
inline __attribute__((always_inline)) void shrink64(const T* w, const Keys64<T>& keys, const Keys64<T>& t, T* out) {
    const __m256i sign = _mm256_set1_epi16(INT16_MIN), zero = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
        const __m256i d = difference<T>(keys.v[i], t.v[i]), x = load256(w + 16 * i);
        const __m256i signed_d = _mm256_or_si256(_mm256_andnot_si256(sign, d), _mm256_and_si256(sign, x));
        const __m256i result = _mm256_andnot_si256(_mm256_cmpeq_epi16(d, zero), signed_d);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * i), result);
    }
}

// Four elements as fp64.
inline __m256d widened4(const float* w) { return _mm256_cvtps_pd(_mm_loadu_ps(w)); }
inline __m256d widened4(const bf16* w) {
    const __m128i x = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w)));
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(x, 16)));
}
inline __m256d widened4(const fp16* w) { return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w)))); }

// The sums of w s and of s s: element i goes to lane i % 16. A product of two fp32 numbers is exact in fp64, so that a
// fused multiplication rounds as the separate one does.
class Dots {
  public:
    Dots() {
        for (int i = 0; i < 4; ++i) ws_[i] = ss_[i] = _mm256_setzero_pd();
    }
    template <class T>
    void add64(const T* w, const T* s) {
        for (int i = 0; i < 64; i += 4) {
            const __m256d x = widened4(w + i), y = widened4(s + i);
            ws_[i / 4 % 4] = _mm256_fmadd_pd(x, y, ws_[i / 4 % 4]);
            ss_[i / 4 % 4] = _mm256_fmadd_pd(y, y, ss_[i / 4 % 4]);
        }
    }
    void lanes(double* ws, double* ss) const {
        for (int i = 0; i < 4; ++i) {
            _mm256_storeu_pd(ws + 4 * i, ws_[i]);
            _mm256_storeu_pd(ss + 4 * i, ss_[i]);
        }
    }

  private:
    __m256d ws_[4], ss_[4];
};

}  // namespace
}  // namespace nm

#endif
