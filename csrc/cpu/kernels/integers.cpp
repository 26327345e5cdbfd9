// Values as integers of 8 or 4 bits with a step: from floats, and back. The rules, and their order of operations, are those of
// nmkernels/reference/integers.py.
#include <limits>

#include "integer_values.h"
#include "scratch.h"

namespace nm {
namespace {

constexpr int kCandidates = 42, kCandidateRoom = 48;  // whole registers

struct Range {
    float low, high;
};
constexpr Range kEight{-127.0f, 127.0f}, kFour{-8.0f, 7.0f};

// w / step to the nearest integer, ties to even, in the range; 0 for 0 / 0. The bounds are integers, so that rounding may come last:
// next to 1.5 * 2^23, whose ulp is 1, fp32 addition does it.
inline float rounded(float w, float step, Range range) {
    float t = w / step;
    t = t == t ? t : 0.0f;
    t = t > range.high ? range.high : t;
    t = t < range.low ? range.low : t;
    return (t + 12582912.0f) - 12582912.0f;
}

// The candidate with the least squared error, the first of equals. Candidates lie side by side, each error is summed in order.
inline bf16 searched(const float* w, int64_t count, float size, float first) {
    bf16 candidates[kCandidates];
    alignas(64) float steps[kCandidateRoom], errors[kCandidateRoom] = {};
    int c = 0;
    for (int f = 20; f < 43; ++f) candidates[c++] = from_float<bf16>(size * float(f / 40.0) / 7.0f);
    for (int f = 24; f < 43; ++f) candidates[c++] = from_float<bf16>(-first * float(f / 40.0) / 8.0f);
    for (int i = 0; i < kCandidateRoom; ++i) steps[i] = to_float(candidates[std::min(i, kCandidates - 1)]);
    for (int64_t k = 0; k < count; ++k) {
        for (int i = 0; i < kCandidateRoom; ++i) {
            const float d = w[k] - rounded(w[k], steps[i], kFour) * steps[i];
            errors[i] += d * d;
        }
    }
    int best = 0;
    float least = std::numeric_limits<float>::infinity();
    for (int i = 0; i < kCandidates; ++i) {
        if (errors[i] < least) best = i, least = errors[i];
    }
    return candidates[best];
}

// The integers of one run, and its step.
inline bf16 quantize_run(const float* w, int64_t count, int bits, int8_t* integers) {
    float size = 0.0f, first = 0.0f;
    bool finite = true;
    for (int64_t k = 0; k < count; ++k) {
        const float a = magnitude(w[k]);
        finite &= is_finite(w[k]);
        first = a > size ? w[k] : first;
        size = a > size ? a : size;
    }
    bf16 step{0};
    if (!finite) step = bf16{0x7fc0};
    else if (size > 0.0f) step = bits == 8 ? from_float<bf16>(size / 127.0f) : searched(w, count, size, first);
    const float by = to_float(step);
    if (!finite || by == 0.0f) {
        std::memset(integers, 0, size_t(count));
    } else {
        const Range range = bits == 8 ? kEight : kFour;
        for (int64_t k = 0; k < count; ++k) integers[k] = int8_t(rounded(w[k], by, range));
    }
    return step;
}

}  // namespace

namespace NM_ISA {

void dequantize_values(const Integers& w, int dtype, void* values, int threads) {
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        parallel_ranges(w.rows, w.kept, threads, [&](int64_t begin, int64_t end) {
            static thread_local Scratch room;
            float* decoded = room.at_least<float>(w.kept);
            for (int64_t row = begin; row < end; ++row) {
                decode_row(w, row, decoded);
                from_floats(decoded, w.kept, static_cast<T*>(values) + row * w.kept);
            }
        });
    });
}

void quantize_values(const void* w, int dtype, int64_t rows, int64_t kept, int64_t steps, int bits, void* values, bf16* step, int threads) {
    const int64_t run = kept / steps, bytes = bits == 8 ? kept : (kept + 1) / 2;
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        parallel_ranges(rows, kept * (bits == 8 ? 1 : 64), threads, [&](int64_t begin, int64_t end) {
            static thread_local Scratch floats_room, integers_room;
            float* wide = floats_room.at_least<float>(kept);
            int8_t* integers = integers_room.at_least<int8_t>(kept + 1);
            for (int64_t row = begin; row < end; ++row) {
                to_floats(static_cast<const T*>(w) + row * kept, kept, wide);
                uint8_t* to = static_cast<uint8_t*>(values) + row * bytes;
                int8_t* into = bits == 8 ? reinterpret_cast<int8_t*>(to) : integers;
                for (int64_t s = 0; s < steps; ++s) step[row * steps + s] = quantize_run(wide + s * run, run, bits, into + s * run);
                if (bits == 8) continue;
                integers[kept] = 0;
                for (int64_t i = 0; i < bytes; ++i) to[i] = uint8_t((integers[2 * i] & 15) | (integers[2 * i + 1] & 15) << 4);
            }
        });
    });
}

}  // namespace NM_ISA
}  // namespace nm
