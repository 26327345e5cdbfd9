// Eight floats in an AVX2 register: see adamw_avx512.h.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include "../../../core/types.h"

namespace nm {
namespace {

struct Floats {
    static constexpr int width = 8;
    __m256 x;

    Floats() = default;
    Floats(__m256 v) : x(v) {}
    explicit Floats(float v) : x(_mm256_set1_ps(v)) {}
    static Floats load(const float* from) { return _mm256_loadu_ps(from); }
    void store(float* to) const { _mm256_storeu_ps(to, x); }
};

inline Floats operator+(Floats a, Floats b) { return _mm256_add_ps(a.x, b.x); }
inline Floats operator-(Floats a, Floats b) { return _mm256_sub_ps(a.x, b.x); }
inline Floats operator*(Floats a, Floats b) { return _mm256_mul_ps(a.x, b.x); }
inline Floats operator/(Floats a, Floats b) { return _mm256_div_ps(a.x, b.x); }
inline Floats operator-(Floats a) { return _mm256_xor_ps(a.x, _mm256_set1_ps(-0.0f)); }
inline Floats root(Floats a) { return _mm256_sqrt_ps(a.x); }
inline Floats magnitude(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.x); }
inline Floats clamped(Floats a, Floats bound) { return _mm256_min_ps(bound.x, _mm256_max_ps((-bound).x, a.x)); }  // NaN: the second operand

inline Floats larger(Floats a, Floats b) {
    const __m256 first = _mm256_or_ps(_mm256_cmp_ps(a.x, b.x, _CMP_GT_OQ), _mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q));
    return _mm256_blendv_ps(b.x, a.x, first);
}

// The larger of magnitudes, every NaN above all: the order of their bits.
inline Floats higher(Floats a, Floats b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a.x), _mm256_castps_si256(b.x)));
}

// One truth value per lane, all bits of it.
struct Flags {
    __m256i x;

    static Flags of(uint64_t bits) {
        const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        return {_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), bit), bit)};
    }
    static Flags of(const Kept64<float>& kept, int i) { return {_mm256_xor_si256(kept.dropped[i], _mm256_set1_epi32(-1))}; }
};

inline Flags operator~(Flags a) { return {_mm256_xor_si256(a.x, _mm256_set1_epi32(-1))}; }
inline Flags operator&(Flags a, Flags b) { return {_mm256_and_si256(a.x, b.x)}; }
inline Flags operator^(Flags a, Flags b) { return {_mm256_xor_si256(a.x, b.x)}; }
inline Flags equal(Floats a, Floats b) { return {_mm256_castps_si256(_mm256_cmp_ps(a.x, b.x, _CMP_EQ_OQ))}; }
inline Flags unequal(Floats a, Floats b) { return {_mm256_castps_si256(_mm256_cmp_ps(a.x, b.x, _CMP_NEQ_UQ))}; }
inline Floats choose(Flags lanes, Floats yes, Floats no) { return _mm256_blendv_ps(no.x, yes.x, _mm256_castsi256_ps(lanes.x)); }
inline Floats kept(Flags lanes, Floats a) { return _mm256_and_ps(a.x, _mm256_castsi256_ps(lanes.x)); }

// As Keys64::two_of_four of select_avx2.h: the larger of a pair is kept if it beats the smaller of the other pair, the
// smaller if it beats the larger. The lower index wins ties: there this one is the higher by 1.
inline Flags two_of_four(Floats w) {
    const __m256i nan = _mm256_set1_epi32(int32_t(Key<float>::nan));
    const __m256i key = _mm256_min_epi32(_mm256_castps_si256(magnitude(w).x), nan);
    const __m256i other = _mm256_shuffle_epi32(key, 0xb1);
    const __m256i larger = _mm256_cmpgt_epi32(_mm256_add_epi32(key, _mm256_set1_epi64x(1)), other);
    const __m256i low = _mm256_shuffle_epi32(_mm256_min_epi32(key, other), 0x4e), high = _mm256_shuffle_epi32(_mm256_max_epi32(key, other), 0x4e);
    const __m256i rival = _mm256_blendv_epi8(high, low, larger);
    return {_mm256_cmpgt_epi32(_mm256_add_epi32(key, _mm256_setr_epi32(1, 1, 0, 0, 1, 1, 0, 0)), rival)};
}

// How many flags were set, in each lane.
struct Count {
    __m256i x = _mm256_setzero_si256();

    void add(Flags a) { x = _mm256_sub_epi32(x, a.x); }
    int64_t total() const {
        alignas(32) int32_t lane[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lane), x);
        int64_t sum = 0;
        for (int32_t one : lane) sum += one;
        return sum;
    }
};

struct Doubles {
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();

    void store(double* to) const {
        _mm256_storeu_pd(to, low);
        _mm256_storeu_pd(to + 4, high);
    }
};

template <class F>
void by_eight(Floats a, const F& f) {
    f(Doubles{_mm256_cvtps_pd(_mm256_castps256_ps128(a.x)), _mm256_cvtps_pd(_mm256_extractf128_ps(a.x, 1))});
}

inline __m256 folded(const Floats (&x)[8]) {
    const Floats even = (x[0] + x[2]) + (x[4] + x[6]), odd = (x[1] + x[3]) + (x[5] + x[7]);
    return (even + odd).x;
}
inline bool finite(__m256 a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_set1_ps(__builtin_inff()), _CMP_LT_OQ)) == 0xff; }
inline Doubles widened(__m256 a) { return {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))}; }

inline void add(Doubles& sum, Doubles a) {
    sum.low = _mm256_add_pd(sum.low, a.low);
    sum.high = _mm256_add_pd(sum.high, a.high);
}

// The logarithm of a product: the mantissas' product, and the sum of the exponents.
struct Product {
    __m256d mantissas[2] = {_mm256_set1_pd(1.0), _mm256_set1_pd(1.0)};
    __m256i exponents[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};

    // times max(a, smallest), a not negative
    void times(Doubles a, double smallest) {
        times(0, a.low, smallest);
        times(1, a.high, smallest);
    }

    void store(double* mantissa, int64_t* exponent) const {
        for (int i = 0; i < 2; ++i) {
            _mm256_storeu_pd(mantissa + 4 * i, mantissas[i]);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(exponent + 4 * i), exponents[i]);
        }
    }

  private:
    void times(int i, __m256d a, double smallest) {
        const __m256i bits = _mm256_castpd_si256(_mm256_max_pd(a, _mm256_set1_pd(smallest)));
        exponents[i] = _mm256_add_epi64(exponents[i], _mm256_srli_epi64(bits, 52));
        const __m256d fraction = _mm256_castsi256_pd(_mm256_and_si256(bits, _mm256_set1_epi64x((int64_t(1) << 52) - 1)));
        mantissas[i] = _mm256_mul_pd(mantissas[i], _mm256_or_pd(fraction, _mm256_set1_pd(1.0)));
    }
};

}  // namespace
}  // namespace nm
#endif
