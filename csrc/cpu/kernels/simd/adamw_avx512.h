// Sixteen floats in an AVX-512 register, as core/adamw.h computes with them, and their sums in eight fp64 lanes:
// element i of a run goes to lane i mod 8, under every instruction set.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include "../../../core/types.h"

namespace nm {
namespace {

// A number for every lane.
struct Same {
    __m512 x;

    explicit Same(float v) : x(_mm512_set1_ps(v)) {}
};

struct Floats {
    static constexpr int width = 16;
    __m512 x;

    Floats() = default;
    Floats(__m512 v) : x(v) {}
    explicit Floats(Same v) : x(v.x) {}
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

// sum + scale a, rounded once
inline Floats add_scaled(Floats sum, float scale, Floats a) { return _mm512_fmadd_ps(a.x, _mm512_set1_ps(scale), sum.x); }

// One truth value per lane.
struct Flags {
    __mmask16 k;

    static Flags of(uint64_t bits) { return {__mmask16(bits)}; }  // lane i: bit i
    static Flags of(const Kept64<float>& kept, int i) { return of(kept.word >> (16 * i)); }
};

inline Flags operator~(Flags a) { return {_knot_mask16(a.k)}; }
inline Flags operator&(Flags a, Flags b) { return {_kand_mask16(a.k, b.k)}; }
inline Flags operator^(Flags a, Flags b) { return {_kxor_mask16(a.k, b.k)}; }
inline Flags equal(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.x, b.x, _CMP_EQ_OQ)}; }
inline Flags unequal(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.x, b.x, _CMP_NEQ_UQ)}; }
inline Floats choose(Flags lanes, Floats yes, Floats no) { return _mm512_mask_mov_ps(no.x, lanes.k, yes.x); }
inline Floats kept(Flags lanes, Floats a) { return _mm512_maskz_mov_ps(lanes.k, a.x); }
inline Floats dropped(Flags lanes, Floats a) { return kept(~lanes, a); }

// Which two of four neighbours are kept, by the order of core/rank.h: those that two of the other three do not beat. Where
// the other one has the lower index it wins ties, this one is handicapped by 1. Keys are below 2^31, so that the sign of
// a difference says who wins, and one ternary operation who wins twice: without 16-bit masks, which few ports handle.
inline Flags two_of_four(Floats w) {
    const __m512i nan = _mm512_set1_epi32(int32_t(Key<float>::nan));
    const __m512i key = _mm512_min_epi32(_mm512_castps_si512(_mm512_abs_ps(w.x)), nan);
    const __m512i odd = _mm512_add_epi32(key, _mm512_set1_epi64(-(int64_t(1) << 32)));
    const __m512i late = _mm512_add_epi32(key, _mm512_set4_epi32(-1, -1, 0, 0));
    const __m512i one = _mm512_sub_epi32(odd, _mm512_shuffle_epi32(key, _MM_PERM_CDAB));  // negative: beaten
    const __m512i two = _mm512_sub_epi32(late, _mm512_shuffle_epi32(key, _MM_PERM_BADC));
    const __m512i three = _mm512_sub_epi32(late, _mm512_shuffle_epi32(key, _MM_PERM_ABCD));
    return {_mm512_movepi32_mask(_mm512_ternarylogic_epi32(one, two, three, 0x17))};
}

// How many flags were set, in each lane.
struct Count {
    __m512i x = _mm512_setzero_si512();

    void add(Flags a) { x = _mm512_mask_sub_epi32(x, a.k, x, _mm512_set1_epi32(-1)); }
    int64_t total() const { return _mm512_reduce_add_epi32(x); }
};

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

// Lane i: elements i and i + 8, added in fp32.
inline Doubles folded(Floats a) {
    return {_mm512_cvtps_pd(_mm256_add_ps(_mm512_castps512_ps256(a.x), _mm512_extractf32x8_ps(a.x, 1)))};
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
