// More arithmetic on pairs of 16-bit numbers, the low one first, as ptx.h has it. All are there from
// sm_80 on.
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
