// More arithmetic on pairs of 16-bit numbers, the low one first, in the style of ptx.h. All exist from sm_80 on.
#pragma once

#include <type_traits>

#include "../core/types.h"
#include "platform.h"
#include "ptx.h"

namespace nm::cuda {

// The larger of each half; all are positive or +0.0.
template <class T>
NM_DEVICE uint32_t larger_pair(uint32_t a, uint32_t b) {
#if defined(NM_EMULATED)
    const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu, high = (a >> 16) > (b >> 16) ? a >> 16 : b >> 16;
    return low | high << 16;
#else
    uint32_t pair;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    } else {
        asm("max.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    }
    return pair;
#endif
}

// The larger magnitude of each half with the sign of `a`; b is positive or +0.0.
template <class T>
NM_DEVICE uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
#if !defined(NM_EMULATED) && __CUDA_ARCH__ >= 860
    // PTX ISA 9.7.4.10 (max): xorsign.abs needs sm_86
    uint32_t pair;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    } else {
        asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    }
    return pair;
#else
    return (a & 0x80008000u) | larger_pair<T>(a & 0x7fff7fffu, b);
#endif
}

#if defined(NM_EMULATED)
namespace emulated {

// Whether a 16-bit number precedes another in the order of max and min: -0.0 below +0.0, NaN above all.
template <class T>
NM_DEVICE bool before(uint16_t a, uint16_t b) {
    const auto key = [](uint16_t x) {
        const uint32_t bits = is_nan(to_float(T{x})) ? 0x7fffu : x;
        return bits & 0x8000u ? 0xffffu ^ bits : bits | 0x8000u;
    };
    return key(a) < key(b);
}

template <class T, class F>
NM_DEVICE uint32_t each_half(uint32_t a, uint32_t b, const F& f) {
    const auto one = [&](uint32_t x, uint32_t y) {
        const uint16_t found = f(uint16_t(x), uint16_t(y));
        return is_nan(to_float(T{found})) ? 0x7fffu : uint32_t(found);
    };
    return one(a & 0xffffu, b & 0xffffu) | one(a >> 16, b >> 16) << 16;
}

}  // namespace emulated
#endif

// PTX ISA 9.7.4.10, 9.7.4.11 (max, min of halves): +0.0 is above -0.0. NaN is above all: max.NaN returns it, min only if both are
// NaN.
template <class T>
NM_DEVICE uint32_t largest_pair(uint32_t a, uint32_t b) {
#if defined(NM_EMULATED)
    return emulated::each_half<T>(a, b, [](uint16_t x, uint16_t y) { return emulated::before<T>(x, y) ? y : x; });
#else
    uint32_t pair;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    } else {
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    }
    return pair;
#endif
}

template <class T>
NM_DEVICE uint32_t smallest_pair(uint32_t a, uint32_t b) {
#if defined(NM_EMULATED)
    return emulated::each_half<T>(a, b, [](uint16_t x, uint16_t y) { return emulated::before<T>(x, y) ? x : y; });
#else
    uint32_t pair;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("min.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    } else {
        asm("min.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    }
    return pair;
#endif
}

// a - b in each half, rounded once.
template <class T>
NM_DEVICE uint32_t difference_pair(uint32_t a, uint32_t b) {
#if defined(NM_EMULATED)
    // rounded twice, which gives the same: see threshold_pairs.h
    return emulated::each_half<T>(a, b, [](uint16_t x, uint16_t y) { return from_float<T>(to_float(T{x}) - to_float(T{y})).bits; });
#else
    uint32_t pair;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(b), "r"(0xbf80bf80u), "r"(a));  // sub.bf16x2 needs sm_90
    } else {
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    }
    return pair;
#endif
}

template <class T>
NM_DEVICE float low_half(uint32_t pair) {
#if !defined(NM_EMULATED)
    if constexpr (!std::is_same_v<T, bf16>) {
        float x;
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(pair));
        return x;
    }
#endif
    return to_float(T{uint16_t(pair)});
}

template <class T>
NM_DEVICE float high_half(uint32_t pair) {
#if !defined(NM_EMULATED)
    if constexpr (std::is_same_v<T, bf16>) return bits_float(pair & 0xffff0000u);
    if constexpr (!std::is_same_v<T, bf16>) {
        float x;
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(pair));
        return x;
    }
#endif
    return to_float(T{uint16_t(pair >> 16)});
}

}  // namespace nm::cuda
