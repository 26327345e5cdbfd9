// Vec: as many fp32 numbers as a register of this instruction set holds, and the few things that products do with it.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace nm {
namespace {

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;

inline Vec vec_load(const float* p) { return _mm512_loadu_ps(p); }
inline void vec_store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec vec_all(float x) { return _mm512_set1_ps(x); }
inline Vec vec_add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec vec_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

#elif defined(__AVX2__) && defined(__FMA__)

using Vec = __m256;
constexpr int kLanes = 8;

inline Vec vec_load(const float* p) { return _mm256_loadu_ps(p); }
inline void vec_store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec vec_all(float x) { return _mm256_set1_ps(x); }
inline Vec vec_add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec vec_fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

#else

// The vector extension of GCC and Clang: SSE2, NEON or whatever the platform's baseline has.
typedef float Vec __attribute__((vector_size(16)));
constexpr int kLanes = 4;

inline Vec vec_load(const float* p) {
    Vec x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}
inline void vec_store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }
inline Vec vec_all(float x) { return Vec{x, x, x, x}; }
inline Vec vec_add(Vec a, Vec b) { return a + b; }
inline Vec vec_fma(Vec a, Vec b, Vec c) { return a * b + c; }

#endif

}  // namespace
}  // namespace nm
