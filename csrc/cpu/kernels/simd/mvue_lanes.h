// Vectors of kLanes 32-bit lanes for mvue: float F, unsigned U, and what a comparison gives, B.
//
// F and U are vectors of the compiler (GCC, Clang), so + - * / & | ^ << >> work on them under every instruction set.
// Written out here is what has no operator. B is a mask register under AVX-512, a vector of 0 and ~0 elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#define NM_INLINE inline __attribute__((always_inline))
#define NM_UNROLL_8 _Pragma("GCC unroll 8")
#define NM_UNROLL_16 _Pragma("GCC unroll 16")

namespace nm {
namespace {

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define NM_MASK_REGISTERS
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));

constexpr unsigned kAllLanes = (1u << kLanes) - 1;

NM_INLINE F splat(float x) { return x - F{}; }  // not F{} + x, which turns -0.0 into 0.0
NM_INLINE U splat(uint32_t x) { return x - U{}; }

NM_INLINE U bits_of(F x) { return reinterpret_cast<U>(x); }
NM_INLINE F float_of(U x) { return reinterpret_cast<F>(x); }

NM_INLINE F load(const float* from) {
    F x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
NM_INLINE void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }

NM_INLINE F magnitude(F x) { return float_of(bits_of(x) & 0x7fffffffu); }
NM_INLINE F inverse_power_of_two(F x) { return float_of(0x7f000000u - bits_of(x)); }
NM_INLINE F with_sign(F magnitude, F sign) { return float_of(bits_of(magnitude) | (bits_of(sign) & 0x80000000u)); }

#if defined(NM_MASK_REGISTERS)

using B = __mmask16;

NM_INLINE B nonzero(U x) { return _mm512_test_epi32_mask(__m512i(x), __m512i(x)); }
NM_INLINE B common(U a, U b) { return _mm512_test_epi32_mask(__m512i(a), __m512i(b)); }
NM_INLINE B zero(U x) { return _mm512_testn_epi32_mask(__m512i(x), __m512i(x)); }
NM_INLINE B equal(U a, U b) { return _mm512_cmpeq_epi32_mask(__m512i(a), __m512i(b)); }
NM_INLINE B at_least(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
NM_INLINE B below(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
NM_INLINE B below(U a, U b) { return _mm512_cmplt_epu32_mask(__m512i(a), __m512i(b)); }
NM_INLINE B either(B a, B b) { return _kor_mask16(a, b); }
NM_INLINE B both(B a, B b) { return _kand_mask16(a, b); }
NM_INLINE B without(B a, B b) { return _kandn_mask16(b, a); }
NM_INLINE B none() { return 0; }
NM_INLINE bool any(B b) { return !_kortestz_mask16_u8(b, b); }
NM_INLINE bool all(B b) { return _kortestc_mask16_u8(b, b); }
NM_INLINE unsigned lanes_of(B b) { return b; }
NM_INLINE F choose(B b, F yes, F no) { return _mm512_mask_blend_ps(b, no, yes); }
NM_INLINE U choose(B b, U yes, U no) { return U(_mm512_mask_blend_epi32(b, __m512i(no), __m512i(yes))); }
NM_INLINE F only_where(B b, F x) { return _mm512_maskz_mov_ps(b, x); }
NM_INLINE F only_where_not(B b, F x) { return _mm512_maskz_mov_ps(_knot_mask16(b), x); }
NM_INLINE U smaller(U a, U b) { return U(_mm512_min_epu32(__m512i(a), __m512i(b))); }
NM_INLINE F smaller_magnitude(F a, F b) { return float_of(smaller(bits_of(a), bits_of(b))); }
NM_INLINE F larger_magnitude(F a, F b) { return float_of(U(_mm512_max_epu32(__m512i(bits_of(a)), __m512i(bits_of(b))))); }
NM_INLINE U truncated(F x) { return U(_mm512_cvttps_epi32(x)); }
NM_INLINE U one_less(B b, U x) { return U(_mm512_mask_sub_epi32(__m512i(x), b, __m512i(x), _mm512_set1_epi32(1))); }
NM_INLINE U one_more(B b, U x) { return U(_mm512_mask_add_epi32(__m512i(x), b, __m512i(x), _mm512_set1_epi32(1))); }

#else

typedef int32_t B __attribute__((vector_size(4 * kLanes)));

NM_INLINE B nonzero(U x) { return x != 0; }
NM_INLINE B common(U a, U b) { return (a & b) != 0; }
NM_INLINE B zero(U x) { return x == 0; }
NM_INLINE B equal(U a, U b) { return a == b; }
NM_INLINE B at_least(F a, F b) { return a >= b; }
NM_INLINE B below(F a, F b) { return a < b; }
NM_INLINE B below(U a, U b) { return a < b; }
NM_INLINE B either(B a, B b) { return a | b; }
NM_INLINE B both(B a, B b) { return a & b; }
NM_INLINE B without(B a, B b) { return a & ~b; }
NM_INLINE B none() { return B{}; }
NM_INLINE unsigned lanes_of(B b) {
#if defined(__AVX2__)
    return unsigned(_mm256_movemask_ps(reinterpret_cast<__m256>(b)));
#elif defined(__SSE2__)
    return unsigned(_mm_movemask_ps(reinterpret_cast<__m128>(b)));
#else
    unsigned found = 0;
    for (int l = 0; l < kLanes; ++l) found |= unsigned(b[l] & 1) << l;
    return found;
#endif
}
NM_INLINE bool any(B b) { return lanes_of(b) != 0; }
NM_INLINE bool all(B b) { return lanes_of(b) == kAllLanes; }
NM_INLINE F only_where(B b, F x) { return float_of(bits_of(x) & reinterpret_cast<U>(b)); }
NM_INLINE F only_where_not(B b, F x) { return float_of(bits_of(x) & ~reinterpret_cast<U>(b)); }
#if defined(__AVX2__)
NM_INLINE F choose(B b, F yes, F no) { return _mm256_blendv_ps(no, yes, reinterpret_cast<__m256>(b)); }
NM_INLINE U choose(B b, U yes, U no) { return bits_of(choose(b, float_of(yes), float_of(no))); }
NM_INLINE U smaller(U a, U b) { return U(_mm256_min_epu32(__m256i(a), __m256i(b))); }
NM_INLINE F smaller_magnitude(F a, F b) { return float_of(smaller(bits_of(a), bits_of(b))); }
NM_INLINE F larger_magnitude(F a, F b) { return float_of(U(_mm256_max_epu32(__m256i(bits_of(a)), __m256i(bits_of(b))))); }
#else
NM_INLINE U choose(B b, U yes, U no) { return (yes & reinterpret_cast<U>(b)) | (no & ~reinterpret_cast<U>(b)); }
NM_INLINE F choose(B b, F yes, F no) { return float_of(choose(b, bits_of(yes), bits_of(no))); }
NM_INLINE U smaller(U a, U b) { return choose(below(a, b), a, b); }
// magnitudes are positive as signed integers, whose comparison SSE2 has
NM_INLINE F smaller_magnitude(F a, F b) { return choose(reinterpret_cast<B>(a) < reinterpret_cast<B>(b), a, b); }
NM_INLINE F larger_magnitude(F a, F b) { return choose(reinterpret_cast<B>(a) < reinterpret_cast<B>(b), b, a); }
#endif
NM_INLINE U truncated(F x) { return reinterpret_cast<U>(__builtin_convertvector(x, B)); }
NM_INLINE U one_less(B b, U x) { return x + reinterpret_cast<U>(b); }
NM_INLINE U one_more(B b, U x) { return x - reinterpret_cast<U>(b); }

#endif

// x as floats; below 2^31
NM_INLINE F counted(U x) {
    typedef int32_t I __attribute__((vector_size(4 * kLanes)));
    return __builtin_convertvector(reinterpret_cast<I>(x), F);
}

// of magnitudes: -0.0 counts as something
NM_INLINE B nonzero(F x) { return nonzero(bits_of(x)); }
NM_INLINE B zero(F x) { return zero(bits_of(x)); }
NM_INLINE F either(F a, F b) { return float_of(bits_of(a) | bits_of(b)); }

}  // namespace
}  // namespace nm
