// More arithmetic on pairs of 16-bit numbers, the low one first, as ptx.h has it, and a quick reciprocal. All are there from
// sm_80 on.
#pragma once

#include <type_traits>

#include "../core/types.h"
#include "platform.h"
#include "ptx.h"

namespace nm::cuda {

// 1 / x, wrong by a unit in the last place or so, for x and 1 / x both normal; 0 and denormals give inf, and become 0. The emulator's is
// wrong by up to two units, another number of them for each x, so that nobody comes to rely on more.
NM_DEVICE float rough_reciprocal(float x) {
#if defined(NM_EMULATED)
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7f800000u) == 0) return bits_float(0x7f800000u);
    const uint32_t y = float_bits(1.0f / x) + ((bits * 0x9e3779b9u) >> 29) % 5u - 2u;
    return y << 1 < 0x01000000u ? 0.0f : bits_float(y);
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

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
