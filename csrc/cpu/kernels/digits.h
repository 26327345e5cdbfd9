// x in integers: each token times a power of two, rounded to 16 bits, which hold bf16 numbers exactly down to 1/128 of the token's
// largest, and as two digits of 8 bits, which integer instructions multiply with stored integers.
#pragma once

#include "integer_values.h"
#include "scratch.h"

namespace nm {
namespace {

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

// The powers of two for x [cols], whose largest integer is to be at most `most`. False: integers are not for it.
inline bool scales_of(const float* x, int64_t cols, float most, float& scale, float& inverse) {
    uint32_t top = 0;
    for (int64_t i = 0; i < cols; ++i) {
        const uint32_t size = float_bits(x[i]) & 0x7fffffffu;
        top = size > top ? size : top;
    }
    const int exponent = int(top >> 23) - 127;
    scale = inverse = 0.0f;
    if (top == 0) return true;
    if (exponent < -100 || exponent == 128) return false;
    const int by = 14 - exponent - (bits_float((top & 0x7fffffu) | (127u + 14u) << 23) > most);
    scale = bits_float(uint32_t(127 - by) << 23);
    inverse = bits_float(uint32_t(127 + by) << 23);
    return true;
}

// x of tokens [token, token + tokens) in fp32, padded with zeros to the digits' width, to f(t, x, inverse), with zeros for those left out.
template <class F>
void each_token(const IntegersLinearCall& call, int64_t token, int64_t tokens, float most, Digits& digits, int threads, const F& f) {
    const int64_t width = digits.width;
    by_dtype(call.dtype, [&](auto element) {
        using T = decltype(element);
        parallel_for(tokens, width * tokens < 2 * kChunk ? 1 : threads, [&](int64_t t) {
            static thread_local Scratch room;
            float* x = room.at_least<float>(width);
            float inverse;
            to_floats(static_cast<const T*>(call.x) + (token + t) * call.cols, call.cols, x);
            std::memset(x + call.cols, 0, size_t(width - call.cols) * sizeof(float));
            digits.left_out[t] = !scales_of(x, call.cols, most, digits.scale[t], inverse);
            if (digits.left_out[t]) std::memset(x, 0, size_t(width) * sizeof(float));
            f(t, x, inverse);
        });
    });
}

}  // namespace
}  // namespace nm
