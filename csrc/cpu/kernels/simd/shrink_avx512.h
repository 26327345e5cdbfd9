// Soft thresholds of 64 elements, each with its own, and their products with the weights, with AVX-512; arithmetic as in
// core/threshold.h.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include "select_avx512.h"

namespace nm {
namespace {

constexpr int kSelect = 0xca;  // ternary logic: where bits of the first are set the second, elsewhere the third

// The larger of d and 0; d where it is NaN.
inline __m512 positive(__m512 d) { return _mm512_max_ps(_mm512_setzero_ps(), d); }

// Keys are magnitudes, so their difference needs no sign; it comes from the weight, but zeros are +0.0. inf - inf is a
// negative NaN in this arithmetic.
inline void shrink64(const float* w, const Keys64<float>& keys, const Keys64<float>& t, float* out) {
    for (int i = 0; i < 4; ++i) {
        const __m512 d = positive(_mm512_sub_ps(_mm512_castsi512_ps(keys.v[i]), _mm512_castsi512_ps(t.v[i])));
        const __m512i bits = _mm512_castps_si512(d), sign = _mm512_set1_epi32(INT32_MIN);
        const __mmask16 some = _mm512_test_epi32_mask(bits, bits);
        _mm512_storeu_si512(out + 16 * i, _mm512_maskz_ternarylogic_epi32(some, sign, _mm512_loadu_si512(w + 16 * i), bits, kSelect));
    }
}

// Differences of 32 keys in fp32, rounded to nearest even; the sign bit counts for nothing.
template <class T>
__m512i difference(__m512i keys, __m512i t);

// A bf16 is the upper half of an fp32: elements with even and odd numbers are widened where they lie. Rounding in
// integers turns no NaN into a number here: theirs is 0x7fc10000 or 0xffc00000.
template <>
inline __m512i difference<bf16>(__m512i keys, __m512i t) {
    const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000)), one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7fff);
    const auto rounded = [&](__m512i a, __m512i b) {
        const __m512i d = _mm512_castps_si512(positive(_mm512_sub_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b))));
        return _mm512_add_epi32(_mm512_add_epi32(d, half), _mm512_and_si512(_mm512_srli_epi32(d, 16), one));
    };
    const __m512i even = rounded(_mm512_slli_epi32(keys, 16), _mm512_slli_epi32(t, 16));
    const __m512i odd = rounded(_mm512_and_si512(keys, upper), _mm512_and_si512(t, upper));
    return _mm512_ternarylogic_epi32(upper, odd, _mm512_srli_epi32(even, 16), kSelect);
}

template <>
inline __m512i difference<fp16>(__m512i keys, __m512i t) {
    const auto half = [&](int i) {
        const __m256i a = i ? _mm512_extracti64x4_epi64(keys, 1) : _mm512_castsi512_si256(keys);
        const __m256i b = i ? _mm512_extracti64x4_epi64(t, 1) : _mm512_castsi512_si256(t);
        const __m512 d = positive(_mm512_sub_ps(_mm512_cvtph_ps(a), _mm512_cvtph_ps(b)));
        return _mm512_cvtps_ph(d, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    };
    // the one NaN of core/types.h for all of them
    return _mm512_min_epu16(_mm512_inserti64x4(_mm512_castsi256_si512(half(0)), half(1), 1), _mm512_set1_epi16(0x7e00));
}

template <class T>
void shrink64(const T* w, const Keys64<T>& keys, const Keys64<T>& t, T* out) {
    const __m512i sign = _mm512_set1_epi16(INT16_MIN);
    for (int i = 0; i < 2; ++i) {
        const __m512i d = difference<T>(keys.v[i], t.v[i]), x = _mm512_loadu_si512(w + 32 * i);
        const __m512i signed_d = _mm512_ternarylogic_epi32(sign, x, d, kSelect);
        _mm512_storeu_si512(out + 32 * i, _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(d, d), signed_d));
    }
}

// Eight elements as fp64.
inline __m512d widened8(const float* w) { return _mm512_cvtps_pd(_mm256_loadu_ps(w)); }
inline __m512d widened8(const bf16* w) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)));
}
inline __m512d widened8(const fp16* w) { return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)))); }

// The sums of w s and of s s: element i goes to lane i % 16. A product of two fp32 numbers is exact in fp64, so that a
// fused multiplication rounds as the separate one does.
class Dots {
  public:
    template <class T>
    void add64(const T* w, const T* s) {
        for (int i = 0; i < 64; i += 8) {
            const __m512d x = widened8(w + i), y = widened8(s + i);
            ws_[i / 8 % 2] = _mm512_fmadd_pd(x, y, ws_[i / 8 % 2]);
            ss_[i / 8 % 2] = _mm512_fmadd_pd(y, y, ss_[i / 8 % 2]);
        }
    }
    void lanes(double* ws, double* ss) const {
        for (int i = 0; i < 2; ++i) {
            _mm512_storeu_pd(ws + 8 * i, ws_[i]);
            _mm512_storeu_pd(ss + 8 * i, ss_[i]);
        }
    }

  private:
    __m512d ws_[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()}, ss_[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
};

}  // namespace
}  // namespace nm

#endif
