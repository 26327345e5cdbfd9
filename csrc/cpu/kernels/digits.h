// For AVX-512. x in integers: each token times a power of two, rounded to 16 bits, which hold bf16 numbers exactly down to 1/128 of the token's
// largest, and as two digits of 8 bits, which integer instructions multiply with stored integers.
#pragma once

#include "integer_values.h"
#include "scratch.h"

#if defined(__AVX512VBMI2__) && defined(__AVX512VNNI__)
#define NM_DIGITS 1

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

// The lowest byte of each lane.
NM_INLINE void store_lowest_bytes(uint8_t* to, Uints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(Register(x)));
}

// The powers of two for x [cols]. False: its integers are not for it.
inline bool scales_of(const float* x, int64_t cols, float& scale, float& inverse) {
    uint32_t top = 0;
    for (int64_t i = 0; i < cols; ++i) {
        const uint32_t size = float_bits(x[i]) & 0x7fffffffu;
        top = size > top ? size : top;
    }
    const int exponent = int(top >> 23) - 127;
    scale = inverse = 0.0f;
    if (top == 0) return true;
    if (exponent < -100 || exponent == 128) return false;
    // the largest must not exceed 127 * 256 + 127, so that both digits may be signed
    const int by = 14 - exponent - (bits_float((top & 0x7fffffu) | (127u + 14u) << 23) > 32639.0f);
    scale = bits_float(uint32_t(127 - by) << 23);
    inverse = bits_float(uint32_t(127 + by) << 23);
    return true;
}

// Digits of tokens [token, token + tokens). `Signed`: both from -128 to 127; else from 0 to 255, the upper one with 128 added.
template <bool Signed>
void make_digits(const IntegersLinearCall& call, int64_t token, int64_t tokens, Digits& digits, int threads) {
    const int64_t width = digits.width;
    by_dtype(call.dtype, [&](auto element) {
        using T = decltype(element);
        parallel_for(tokens, width * tokens < 2 * kChunk ? 1 : threads, [&](int64_t t) {
            static thread_local Scratch room;
            float* x = room.at_least<float>(width);
            float inverse;
            to_floats(static_cast<const T*>(call.x) + (token + t) * call.cols, call.cols, x);
            std::memset(x + call.cols, 0, size_t(width - call.cols) * sizeof(float));
            digits.left_out[t] = !scales_of(x, call.cols, digits.scale[t], inverse);
            if (digits.left_out[t]) std::memset(x, 0, size_t(width) * sizeof(float));
            uint8_t *upper = digits.planes + t * 2 * width, *lower = upper + width;
            for (int64_t i = 0; i < width; i += kLanes) {
                // next to 1.5 * 2^23, whose ulp is 1, a number is rounded, and its lowest bits are the integer's
                const Uints whole = bits_of(load(x + i) * inverse + 12582912.0f);
                store_lowest_bytes(lower + i, whole);
                store_lowest_bytes(upper + i, Signed ? (whole + 128u) >> 8 : (whole >> 8) + 128u);
            }
        });
    });
}

}  // namespace
}  // namespace nm

#endif
