// Element types and their conversions in integer arithmetic, so that every compiler and device agrees.
//
//   bf16  = the upper half of an fp32;        fp16 = 1 sign, 5 exponent (bias 15), 10 mantissa bits
//   both round to nearest, ties to even; overflow gives inf; NaN stays NaN (quiet); denormals are kept.
//
// GPUs have instructions for this with the same results except that NaN is always 0x7fff. They take one instruction,
// integer arithmetic 6 (to bf16) to 20.
//
// This is the only file of core/ that depends on nvcc.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define NM_HD __host__ __device__ __forceinline__
#define NM_UNROLL _Pragma("unroll")
#else
#define NM_HD inline
#define NM_UNROLL
#endif

namespace nm {

constexpr int kMaxM = 256;  // an index inside a group is one byte

struct bf16 {
    uint16_t bits;
};

struct fp16 {
    uint16_t bits;
};

NM_HD uint32_t float_bits(float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

NM_HD float bits_float(uint32_t b) {
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

NM_HD float to_float(float x) { return x; }

NM_HD float to_float(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }

NM_HD float to_float(fp16 x) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(x.bits));
#else
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
    const uint32_t mag = x.bits & 0x7fffu;
    if (mag >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((mag & 0x3ffu) << 13));
    if (mag >= 0x0400u) return bits_float(sign | ((mag << 13) + (112u << 23)));
    // a denormal is mag * 2^-24, exact in fp32; the sign is set afterwards so that -0.0 survives
    return bits_float(sign | float_bits(float(mag) * 5.9604644775390625e-8f));
#endif
}

template <class T>
NM_HD T from_float(float x);

template <>
NM_HD float from_float<float>(float x) {
    return x;
}

template <>
NM_HD bf16 from_float<bf16>(float x) {
#if defined(__CUDA_ARCH__)
    return bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
    const uint32_t b = float_bits(x);
    if ((b & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((b >> 16) | 0x40u)};
    return bf16{uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16)};
#endif
}

template <>
NM_HD fp16 from_float<fp16>(float x) {
#if defined(__CUDA_ARCH__)
    return fp16{__half_as_ushort(__float2half_rn(x))};
#else
    const uint32_t b = float_bits(x);
    const uint32_t sign = (b >> 16) & 0x8000u;
    const uint32_t mag = b & 0x7fffffffu;
    if (mag > 0x7f800000u) return fp16{uint16_t(sign | 0x7e00u)};
    if (mag >= 0x477ff000u) return fp16{uint16_t(sign | 0x7c00u)};  // 65520 and above round to inf
    if (mag >= 0x38800000u) {                                       // 2^-14 and above: a normal fp16
        const uint32_t rounded = mag + 0xfffu + ((mag >> 13) & 1u);
        return fp16{uint16_t(sign | ((rounded - (112u << 23)) >> 13))};
    }
    if (mag < 0x33000000u) return fp16{uint16_t(sign)};  // below 2^-25
    const uint32_t shift = 126u - (mag >> 23);           // 14..24 bits fall off the 24-bit significand
    const uint32_t full = (mag & 0x7fffffu) | 0x800000u;
    const uint32_t kept = full >> shift;
    const uint32_t rest = full & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1u);
    return fp16{uint16_t(sign | (kept + (rest > half || (rest == half && (kept & 1u)))))};
#endif
}

NM_HD float magnitude(float x) {
#if defined(__CUDA_ARCH__)
    return fabsf(x);  // free if the result is added
#else
    return bits_float(float_bits(x) & 0x7fffffffu);
#endif
}

NM_HD float with_sign(float mag, float sign) { return bits_float((float_bits(mag) & 0x7fffffffu) | (float_bits(sign) & 0x80000000u)); }

NM_HD bool is_nan(float x) { return (float_bits(x) & 0x7fffffffu) > 0x7f800000u; }

NM_HD bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

// x if keep is 1, +0.0 if it is 0, without a branch, because masks are unpredictable.
NM_HD float kept_or_zero(float x, uint32_t keep) { return bits_float(float_bits(x) & (0u - keep)); }
NM_HD bf16 kept_or_zero(bf16 x, uint32_t keep) { return bf16{uint16_t(x.bits & (0u - keep))}; }
NM_HD fp16 kept_or_zero(fp16 x, uint32_t keep) { return fp16{uint16_t(x.bits & (0u - keep))}; }

// Integers in the order of magnitudes: key(a) < key(b) iff |a| < |b|; -0.0 and 0.0 tie, NaN is above inf and NaNs tie.
template <class T>
struct Key;

template <>
struct Key<float> {
    static constexpr int bits = 31;
    static constexpr uint32_t nan = 0x7f800001u;
    static NM_HD uint32_t of(float x) {
        const uint32_t k = float_bits(x) & 0x7fffffffu;
        return k > nan ? nan : k;
    }
    static NM_HD float value(uint32_t k) { return bits_float(k); }
};

template <>
struct Key<bf16> {
    static constexpr int bits = 15;
    static constexpr uint32_t nan = 0x7f81u;
    static NM_HD uint32_t of(bf16 x) {
        const uint32_t k = x.bits & 0x7fffu;
        return k > nan ? nan : k;
    }
    static NM_HD float value(uint32_t k) { return to_float(bf16{uint16_t(k)}); }
};

template <>
struct Key<fp16> {
    static constexpr int bits = 15;
    static constexpr uint32_t nan = 0x7c01u;
    static NM_HD uint32_t of(fp16 x) {
        const uint32_t k = x.bits & 0x7fffu;
        return k > nan ? nan : k;
    }
    static NM_HD float value(uint32_t k) { return to_float(fp16{uint16_t(k)}); }
};

NM_HD bool is_zero(float x) { return (float_bits(x) & 0x7fffffffu) == 0; }
NM_HD bool is_zero(bf16 x) { return (x.bits & 0x7fffu) == 0; }
NM_HD bool is_zero(fp16 x) { return (x.bits & 0x7fffu) == 0; }

}  // namespace nm
