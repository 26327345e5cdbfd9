// The registers that all kernels are written with: kLanes 32-bit lanes as Floats or Uints, half as many 64-bit ones as Doubles
// or Longs, and Flags, what a comparison of lanes gives.
//
// The numbers are vectors of the compiler (GCC, Clang), so + - * / & | ^ << >> work on them under every instruction set. What has
// no operator is in one file for each set: avx512.inc, avx2.inc, portable.inc. Flags are a mask register under AVX-512, a vector of 0
// and ~0 elsewhere.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../../../core/bitpack.h"
#include "../../../core/types.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// Parts of one loop: only inlined do their numbers stay in registers.
#define NM_INLINE inline __attribute__((always_inline))
#define NM_UNROLL_8 _Pragma("GCC unroll 8")
#define NM_UNROLL_16 _Pragma("GCC unroll 16")

namespace nm {
namespace {

using nm::magnitude;
using nm::with_sign;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
using Flags = __mmask16;
using Register = __m512i;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
typedef int32_t Flags __attribute__((vector_size(4 * kLanes)));
using Register = __m256i;
#else
constexpr int kLanes = 4;
typedef int32_t Flags __attribute__((vector_size(4 * kLanes)));
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Uints __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));
typedef uint64_t Longs __attribute__((vector_size(4 * kLanes)));

constexpr int kLongs = kLanes / 2;
constexpr unsigned kAllLanes = (1u << kLanes) - 1;

NM_INLINE Floats splat(float x) { return x - Floats{}; }  // not Floats{} + x, which turns -0.0 into 0.0
NM_INLINE Uints splat(uint32_t x) { return x - Uints{}; }

NM_INLINE Uints bits_of(Floats x) { return reinterpret_cast<Uints>(x); }
NM_INLINE Floats float_of(Uints x) { return reinterpret_cast<Floats>(x); }

template <class V>
NM_INLINE V load_as(const void* from) {
    V x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
NM_INLINE Floats load(const float* from) { return load_as<Floats>(from); }
NM_INLINE Uints load(const uint32_t* from) { return load_as<Uints>(from); }
template <class V>
NM_INLINE void store_as(void* to, V x) {
    std::memcpy(to, &x, sizeof x);
}
NM_INLINE void store(float* to, Floats x) { store_as(to, x); }
NM_INLINE void store(uint32_t* to, Uints x) { store_as(to, x); }

// A few bytes as an unsigned number.
template <class Word>
inline Word word_at(const uint8_t* bytes) {
    Word word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

// x as floats; below 2^31
NM_INLINE Floats counted(Uints x) { return __builtin_convertvector(reinterpret_cast<Ints>(x), Floats); }

NM_INLINE Floats magnitude(Floats x) { return float_of(bits_of(x) & 0x7fffffffu); }
NM_INLINE Floats inverse_power_of_two(Floats x) { return float_of(0x7f000000u - bits_of(x)); }

// One number per lane of a register, computed by the compiler.
template <class Lane, class F>
struct alignas(4 * kLanes) Table {
    static constexpr int kCount = 4 * kLanes / sizeof(Lane);
    Lane lane[kCount];
    constexpr explicit Table(F f) : lane() {
        for (int i = 0; i < kCount; ++i) lane[i] = Lane(f(i));
    }
    template <class V>
    V as() const {
        return load_as<V>(lane);
    }
};

}  // namespace
}  // namespace nm

#if defined(__AVX512F__)
#include "avx512.inc"
#elif defined(__AVX2__)
#include "avx2.inc"
#else
#include "portable.inc"
#endif

namespace nm {
namespace {

// of magnitudes: -0.0 counts as something
NM_INLINE Flags nonzero(Floats x) { return nonzero(bits_of(x)); }
NM_INLINE Flags zero(Floats x) { return zero(bits_of(x)); }
NM_INLINE Floats either(Floats a, Floats b) { return float_of(bits_of(a) | bits_of(b)); }

// The sign of one number, the rest of the other.
NM_INLINE Floats with_sign(Floats magnitude, Floats sign) { return float_of(blended(splat(0x80000000u), bits_of(sign), bits_of(magnitude))); }

// kLanes neighbouring elements as floats; of fewer than kLanes those there are, then zeros.
NM_INLINE Floats widened(const float* from) { return load(from); }
template <class T>
NM_INLINE Floats widened(const T* from, int64_t count) {
    if (count >= kLanes) return widened(from);
    T some[kLanes] = {};
    for (int64_t l = 0; l < count; ++l) some[l] = from[l];
    return widened(some);
}

// Floats as the bits of a T in the lower half of each lane, as from_float rounds; a NaN only as bits_float(0x7fc00000).
template <class T>
NM_INLINE Uints narrowed(Floats x) {
    const Uints b = bits_of(x);
    if constexpr (std::is_same_v<T, float>) return b;
    if constexpr (std::is_same_v<T, bf16>) return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    if constexpr (std::is_same_v<T, fp16>) return narrowed_fp16(x);
}

// kLanes floats as neighbouring elements.
template <class T>
NM_INLINE void store_narrowed(T* to, Floats x) {
    if constexpr (sizeof(T) == 4) store_as(to, x);
    else store_lower_halves(to, narrowed<T>(x));
}

// Runs of numbers from their stored type to fp32 and back, by the rules of core/types.h.
inline void to_floats(const float* from, int64_t count, float* to) { std::memcpy(to, from, size_t(count) * sizeof(float)); }

template <class T>
void to_floats(const T* from, int64_t count, float* to) {
    int64_t i = 0;
#if defined(__AVX2__)
    for (; i + kLanes <= count; i += kLanes) store(to + i, widened(from + i));
    if (std::is_same_v<T, fp16> && i < count) {
        const Floats rest = widened(from + i, count - i);
        std::memcpy(to + i, &rest, size_t(count - i) * sizeof(float));
        return;
    }
#endif
    for (; i < count; ++i) to[i] = to_float(from[i]);
}

inline void from_floats(const float* from, int64_t count, float* to) { std::memcpy(to, from, size_t(count) * sizeof(float)); }

inline void from_floats(const float* from, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = from_float<bf16>(from[i]);
}

inline void from_floats(const float* from, int64_t count, fp16* to) {
#if defined(__AVX2__)
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store_narrowed(to + i, load(from + i));
    if (i == count) return;
    fp16 rest[kLanes];
    store_narrowed(rest, widened(from + i, count - i));
    std::memcpy(static_cast<void*>(to + i), rest, size_t(count - i) * sizeof(fp16));
#else
    for (int64_t i = 0; i < count; ++i) to[i] = from_float<fp16>(from[i]);
#endif
}

// to[j * to_row + i] = from[i * from_row + j] for i, j < kLanes
inline void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
    Floats r[kLanes];
    load_transposed(from, from_row * int64_t(sizeof(float)), r);
    NM_UNROLL_16 for (int i = 0; i < kLanes; ++i) store(to + i * to_row, r[i]);
}

#if defined(__AVX2__)
// The indices of kLanes stored weights, one in each lane.
template <int Bits>
NM_INLINE Uints unpacked_indices(const uint8_t* indices) {
    if constexpr (Bits == 8) return low_indices<8>(indices);
    else return low_indices<Bits>(indices) & ((1u << Bits) - 1);
}
#endif

inline uint32_t largest_lane(Uints x) {
    uint32_t largest = 0;
    for (int l = 0; l < kLanes; ++l) largest = x[l] > largest ? x[l] : largest;
    return largest;
}

// f(0), f(1), .. f(Count - 1), written out: arrays indexed by what it passes stay in registers.
template <class F, int... I>
NM_INLINE void each(const F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int Count, class F>
NM_INLINE void each(const F& f) {
    each(f, std::make_integer_sequence<int, Count>{});
}

}  // namespace
}  // namespace nm
