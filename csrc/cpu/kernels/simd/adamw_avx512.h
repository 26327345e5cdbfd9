// Sixteen floats in an AVX-512 register, as core/adamw.h computes with them, and their sums in eight fp64 lanes:
// element i of a run goes to lane i mod 8, under every instruction set. Bit i of a set of lanes is lane i.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include "../../../core/types.h"

namespace nm {
namespace {

struct Floats {
    static constexpr int width = 16;
    __m512 x;

    Floats(__m512 v) : x(v) {}
    explicit Floats(float v) : x(_mm512_set1_ps(v)) {}
    static Floats load(const float* from) { return _mm512_loadu_ps(from); }
    void store(float* to) const { _mm512_storeu_ps(to, x); }
};

inline Floats operator+(Floats a, Floats b) { return _mm512_add_ps(a.x, b.x); }
inline Floats operator-(Floats a, Floats b) { return _mm512_sub_ps(a.x, b.x); }
inline Floats operator*(Floats a, Floats b) { return _mm512_mul_ps(a.x, b.x); }
inline Floats operator/(Floats a, Floats b) { return _mm512_div_ps(a.x, b.x); }
inline Floats operator-(Floats a) { return _mm512_xor_ps(a.x, _mm512_set1_ps(-0.0f)); }
inline Floats root(Floats a) { return _mm512_sqrt_ps(a.x); }
inline Floats magnitude(Floats a) { return _mm512_abs_ps(a.x); }
inline Floats clamped(Floats a, Floats bound) { return _mm512_min_ps(bound.x, _mm512_max_ps((-bound).x, a.x)); }  // NaN: the second operand

inline Floats larger(Floats a, Floats b) {
    const __mmask16 first = _mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ) | _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(b.x, first, a.x);
}

// The larger of magnitudes, every NaN above all: the order of their bits.
inline Floats higher(Floats a, Floats b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.x), _mm512_castps_si512(b.x)));
}

inline Floats choose(uint32_t lanes, Floats yes, Floats no) { return _mm512_mask_mov_ps(no.x, __mmask16(lanes), yes.x); }
inline Floats kept(uint32_t lanes, Floats a) { return _mm512_maskz_mov_ps(__mmask16(lanes), a.x); }
inline uint32_t equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.x, b.x, _CMP_EQ_OQ); }

struct Doubles {
    __m512d x = _mm512_setzero_pd();

    void store(double* to) const { _mm512_storeu_pd(to, x); }
};

// f(elements 0 to 7), f(elements 8 to 15)
template <class F>
void by_eight(Floats a, const F& f) {
    f(Doubles{_mm512_cvtps_pd(_mm512_castps512_ps256(a.x))});
    f(Doubles{_mm512_cvtps_pd(_mm512_extractf32x8_ps(a.x, 1))});
}

inline void add(Doubles& sum, Doubles a) { sum.x = _mm512_add_pd(sum.x, a.x); }

// The logarithm of a product: the mantissas' product, and the sum of the exponents.
struct Product {
    __m512d mantissas = _mm512_set1_pd(1.0);
    __m512i exponents = _mm512_setzero_si512();

    // times max(a, smallest), a not negative
    void times(Doubles a, double smallest) {
        const __m512i bits = _mm512_castpd_si512(_mm512_max_pd(a.x, _mm512_set1_pd(smallest)));
        exponents = _mm512_add_epi64(exponents, _mm512_srli_epi64(bits, 52));
        const __m512i one = _mm512_castpd_si512(_mm512_set1_pd(1.0));
        mantissas = _mm512_mul_pd(mantissas, _mm512_castsi512_pd(_mm512_ternarylogic_epi64(bits, _mm512_set1_epi64(kMantissa), one, 0xea)));
    }

    void store(double* mantissa, int64_t* exponent) const {
        _mm512_storeu_pd(mantissa, mantissas);
        _mm512_storeu_si512(exponent, exponents);
    }

    static constexpr int64_t kMantissa = (int64_t(1) << 52) - 1;
};

}  // namespace
}  // namespace nm
#endif
