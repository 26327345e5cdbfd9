// 8-bit elements and their conversion from fp32 in integer arithmetic, so that every compiler and device agrees.
//
//   e4m3  1 sign, 4 exponent (bias 7), 3 mantissa bits; largest 448, no inf      (torch.float8_e4m3fn)
//   e5m2  1 sign, 5 exponent (bias 15), 2 mantissa bits; largest 57344           (torch.float8_e5m2)
//   int8_t
//
// All round to nearest, ties to even, and saturate at the largest number, also for inf, as GPUs do (PTX ISA, cvt with
// .satfinite). NaN stays NaN, or becomes 0 in int8; -128 does not occur.
#pragma once

#include "types.h"

namespace nm {

// Dtype codes, continuing those of dispatch.h.
enum EightBit : int { kE4m3 = 4, kE5m2 = 5, kInt8 = 6 };

struct e4m3 {
    uint8_t bits;
};

struct e5m2 {
    uint8_t bits;
};

// The bits of x with this number of mantissa bits and exponent bias; `largest`: the code of the largest number.
template <int kMantissa, int kBias, uint32_t kLargest>
NM_HD uint8_t small_float_bits(float x) {
    constexpr uint32_t smallest = uint32_t(127 + 1 - kBias) << 23;  // the smallest normal number, as fp32
    const uint32_t b = float_bits(x), sign = b >> 24 & 0x80u, magnitude = b & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint8_t(sign | 0x7fu);
    uint32_t code;
    if (magnitude < smallest) {
        // a number whose last bit has the weight of the denormals' last bit: the addition rounds
        constexpr float magic = 1.5f * float(1u << (23 - 1)) / float(1u << (kBias - 2 + kMantissa));
        code = float_bits(bits_float(magnitude) + magic) - float_bits(magic);
    } else {
        code = (magnitude - (uint32_t(127 - kBias) << 23) + ((1u << (22 - kMantissa)) - 1) + (magnitude >> (23 - kMantissa) & 1u)) >> (23 - kMantissa);
    }
    return uint8_t(sign | (code < kLargest ? code : kLargest));
}

template <>
NM_HD e4m3 from_float<e4m3>(float x) {
    return {small_float_bits<3, 7, 0x7e>(x)};
}

template <>
NM_HD e5m2 from_float<e5m2>(float x) {
    return {small_float_bits<2, 15, 0x7b>(x)};
}

template <>
NM_HD int8_t from_float<int8_t>(float x) {
    if (is_nan(x)) return 0;
    const float within = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: its last bit has weight 1
    return int8_t(int32_t(float_bits(within + magic)) - int32_t(float_bits(magic)));
}

NM_HD uint32_t eight_bits(e4m3 x) { return x.bits; }
NM_HD uint32_t eight_bits(e5m2 x) { return x.bits; }
NM_HD uint32_t eight_bits(int8_t x) { return uint8_t(x); }

}  // namespace nm
