// Sixteen floats in two AVX2 registers: see adamw_avx512.h.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include "../../../core/types.h"

namespace nm {
namespace {

// A number for every lane.
struct Same {
    __m256 x;

    explicit Same(float v) : x(_mm256_set1_ps(v)) {}
};

struct Floats {
    static constexpr int width = 16;
    __m256 low, high;

    Floats() = default;
    explicit Floats(Same v) : low(v.x), high(v.x) {}
    Floats(__m256 l, __m256 h) : low(l), high(h) {}
    explicit Floats(float v) : low(_mm256_set1_ps(v)), high(low) {}
    static Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
    void store(float* to) const {
        _mm256_storeu_ps(to, low);
        _mm256_storeu_ps(to + 8, high);
    }
};

// f of each half
template <class F, class... More>
Floats by_half(const F& f, const More&... of) {
    return {f(of.low...), f(of.high...)};
}

inline __m256 flipped(__m256 a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats operator-(Floats a) { return {flipped(a.low), flipped(a.high)}; }
inline Floats root(Floats a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
inline Floats magnitude(Floats a) {
    return by_half([](__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }, a);
}

// NaN: the second operand of min and max
inline Floats clamped(Floats a, Floats bound) {
    return by_half([](__m256 x, __m256 most) { return _mm256_min_ps(most, _mm256_max_ps(flipped(most), x)); }, a, bound);
}

inline Floats larger(Floats a, Floats b) {
    const auto pick = [](__m256 x, __m256 y) {
        const __m256 first = _mm256_or_ps(_mm256_cmp_ps(x, y, _CMP_GT_OQ), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        return _mm256_blendv_ps(y, x, first);
    };
    return by_half(pick, a, b);
}

// The larger of magnitudes, every NaN above all: the order of their bits.
inline Floats higher(Floats a, Floats b) {
    const auto max = [](__m256 x, __m256 y) {
        return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
    };
    return by_half(max, a, b);
}

// sum + scale a, rounded once
inline Floats add_scaled(Floats sum, float scale, Floats a) {
    const __m256 by = _mm256_set1_ps(scale);
    return {_mm256_fmadd_ps(a.low, by, sum.low), _mm256_fmadd_ps(a.high, by, sum.high)};
}

// One truth value per lane, all bits of it.
struct Flags {
    __m256i low, high;

    static Flags of(uint64_t bits) {
        const __m256i first = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), second = _mm256_slli_epi32(first, 8);
        const __m256i all = _mm256_set1_epi32(int32_t(bits));
        return {_mm256_cmpeq_epi32(_mm256_and_si256(all, first), first), _mm256_cmpeq_epi32(_mm256_and_si256(all, second), second)};
    }
    static Flags of(const Kept64<float>& kept, int i) {
        const __m256i ones = _mm256_set1_epi32(-1);
        return {_mm256_xor_si256(kept.dropped[2 * i], ones), _mm256_xor_si256(kept.dropped[2 * i + 1], ones)};
    }
};

template <int Predicate>
Flags compared(Floats a, Floats b) {
    const __m256 low = _mm256_cmp_ps(a.low, b.low, Predicate), high = _mm256_cmp_ps(a.high, b.high, Predicate);
    return {_mm256_castps_si256(low), _mm256_castps_si256(high)};
}

inline Flags operator~(Flags a) {
    const __m256i ones = _mm256_set1_epi32(-1);
    return {_mm256_xor_si256(a.low, ones), _mm256_xor_si256(a.high, ones)};
}
inline Flags operator&(Flags a, Flags b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Flags operator^(Flags a, Flags b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
inline Flags equal(Floats a, Floats b) { return compared<_CMP_EQ_OQ>(a, b); }
inline Flags unequal(Floats a, Floats b) { return compared<_CMP_NEQ_UQ>(a, b); }
inline __m256 chosen(__m256i lanes, __m256 yes, __m256 no) { return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(lanes)); }
inline __m256i chosen(__m256i lanes, __m256i yes, __m256i no) {  // as floats: of bytes, g++ 12 compares the lanes with zero first
    return _mm256_castps_si256(chosen(lanes, _mm256_castsi256_ps(yes), _mm256_castsi256_ps(no)));
}
inline Floats choose(Flags lanes, Floats yes, Floats no) {
    return {chosen(lanes.low, yes.low, no.low), chosen(lanes.high, yes.high, no.high)};
}
inline Floats kept(Flags lanes, Floats a) {
    return {_mm256_and_ps(a.low, _mm256_castsi256_ps(lanes.low)), _mm256_and_ps(a.high, _mm256_castsi256_ps(lanes.high))};
}
inline Floats dropped(Flags lanes, Floats a) {
    return {_mm256_andnot_ps(_mm256_castsi256_ps(lanes.low), a.low), _mm256_andnot_ps(_mm256_castsi256_ps(lanes.high), a.high)};
}

// Which two of four neighbours are kept, by the order of core/rank.h. One register gets the first elements of all pairs,
// another the second ones; four lanes are then the pairs 0 and 1 of a group of either half. The smaller of a pair is kept
// if it beats the larger of the other pair, which then is dropped, else kept. The lower index wins ties.
inline Flags two_of_four(Floats w) {
    const __m256i nan = _mm256_set1_epi32(int32_t(Key<float>::nan));
    const auto key = [&](__m256 x) { return _mm256_castsi256_ps(_mm256_min_epi32(_mm256_castps_si256(x), nan)); };
    const Floats size = magnitude(w);
    const __m256 low = key(size.low), high = key(size.high);
    const __m256i first = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
    const __m256i second = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd));
    const __m256i rising = _mm256_cmpgt_epi32(second, first);  // the second element is the larger
    const __m256i rival = _mm256_shuffle_epi32(_mm256_max_epi32(first, second), 0xb1);
    const __m256i smaller = _mm256_cmpgt_epi32(_mm256_add_epi32(_mm256_min_epi32(first, second), _mm256_set1_epi64x(1)), rival);
    const __m256i larger = _mm256_xor_si256(_mm256_shuffle_epi32(smaller, 0xb1), _mm256_set1_epi32(-1));
    const __m256i one = chosen(rising, smaller, larger), two = chosen(rising, larger, smaller);
    return {_mm256_unpacklo_epi32(one, two), _mm256_unpackhi_epi32(one, two)};
}

// How many flags were set, in each lane.
struct Count {
    __m256i x = _mm256_setzero_si256();

    void add(Flags a) { x = _mm256_sub_epi32(x, _mm256_add_epi32(a.low, a.high)); }
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

    Doubles() = default;
    explicit Doubles(__m256 a)
        : low(_mm256_cvtps_pd(_mm256_castps256_ps128(a))), high(_mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))) {}

    void store(double* to) const {
        _mm256_storeu_pd(to, low);
        _mm256_storeu_pd(to + 4, high);
    }
};

template <class F>
void by_eight(Floats a, const F& f) {
    f(Doubles(a.low));
    f(Doubles(a.high));
}

inline Doubles folded(Floats a) { return Doubles(_mm256_add_ps(a.low, a.high)); }

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
