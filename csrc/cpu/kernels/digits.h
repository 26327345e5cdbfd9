// x in integers: each token times a power of two, rounded to 16 bits, which hold bf16 numbers exactly down to 1/128 of the token's
// largest, and as two digits of 8 bits, which integer instructions multiply with stored integers.
#pragma once

#include <memory>

#include "../kernels.h"
#include "scratch.h"
#include "simd/simd.h"

namespace nm {
namespace {

constexpr int kMostTokens = 16;
constexpr int64_t kWidth = 1024;  // what the columns of digits are padded to whole numbers of, with zeros

// Digits of some tokens, [token][2][width]: the upper ones, then the lower ones.
struct Digits {
    uint8_t* planes;
    int64_t width;
    float scale[kMostTokens];    // x = scale * integer
    bool left_out[kMostTokens];  // a token that is not finite, or too small for this; its digits are those of zeros

    const uint8_t* upper(int64_t token) const { return planes + token * 2 * width; }
    const uint8_t* lower(int64_t token) const { return upper(token) + width; }
};

// One token: the integers of x [cols], padded to `width` with zeros. False: by floats.
inline bool integers_of(const float* x, int64_t cols, int64_t width, int16_t* to, float& scale) {
    uint32_t top = 0;
    for (int64_t i = 0; i < cols; ++i) {
        const uint32_t size = float_bits(x[i]) & 0x7fffffffu;
        top = size > top ? size : top;
    }
    const int exponent = int(top >> 23) - 127;
    const bool fits = top == 0 || (exponent >= -100 && exponent < 128);
    // the largest must not exceed 127 * 256 + 127, so that both digits may be signed
    const int by = 14 - exponent - (fits && bits_float((top & 0x7fffffu) | (127u + 14u) << 23) > 32639.0f);
    scale = top && fits ? bits_float(uint32_t(127 - by) << 23) : 0.0f;
    const float inverse = top && fits ? bits_float(uint32_t(127 + by) << 23) : 0.0f;
    if (!fits) {
        std::memset(to, 0, size_t(width) * sizeof(int16_t));
        return false;
    }
    // added to 1.5 * 2^23, whose ulp is 1, a number is rounded, and its lowest bits are the integer's
    for (int64_t i = 0; i < cols; ++i) to[i] = int16_t(float_bits(x[i] * inverse + 12582912.0f));
    std::memset(to + cols, 0, size_t(width - cols) * sizeof(int16_t));
    return true;
}

// Digits of tokens [token, token + tokens). `Signed`: both from -128 to 127; else from 0 to 255, the upper one with 128 added.
template <bool Signed>
void make_digits(const IntegersLinearCall& call, int64_t token, int64_t tokens, Digits& digits, int threads) {
    const int64_t width = digits.width;
    by_dtype(call.dtype, [&](auto element) {
        using T = decltype(element);
        parallel_for(tokens, width * tokens < 3 * kChunk ? 1 : threads, [&](int64_t t) {
            static thread_local Scratch room;
            float* x = room.at_least<float>(width + width / 2);
            int16_t* whole = reinterpret_cast<int16_t*>(x + width);
            to_floats(static_cast<const T*>(call.x) + (token + t) * call.cols, call.cols, x);
            digits.left_out[t] = !integers_of(x, call.cols, width, whole, digits.scale[t]);
            uint8_t *upper = digits.planes + t * 2 * width, *lower = upper + width;
            constexpr int kHalf = Signed ? 128 : 0, kOffset = Signed ? 0 : 128;  // a lower digit from 128 on counts as negative
            for (int64_t i = 0; i < width; ++i) upper[i] = uint8_t(((whole[i] + kHalf) >> 8) + kOffset);
            for (int64_t i = 0; i < width; ++i) lower[i] = uint8_t(whole[i]);
        });
    });
}

}  // namespace
}  // namespace nm
