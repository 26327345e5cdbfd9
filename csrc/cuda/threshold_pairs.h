// The soft threshold of 16-bit numbers, two at a time. Processing single numbers would take three times the instructions, most of
// them at half rate.
//
//   S = x - c,  c = min(max(x, -t), t),  rounded once to T
//
// core/threshold.h rounds |x| - t to fp32 and then to T, which gives the same: double rounding is innocuous if the first format has
// at least twice the digits plus two (Figueroa, When is double rounding innocuous, 1995), here 24 against 8 or 11; a difference
// below the normal range is exact. If |x| <= t the result is x - x = +0.0.
#pragma once

#include "ptx_halves.h"

namespace nm::cuda {

// `t`: the threshold of each half, at least +0.0.
template <class T>
NM_DEVICE uint32_t shrunk_pair(uint32_t x, uint32_t t) {
    return difference_pair<T>(x, smallest_pair<T>(largest_pair<T>(x, t ^ 0x80008000u), t));
}

// The largest magnitudes of two groups of four, in words 0 and 1 and in words 2 and 3: halves of each number, the largest first.
template <class T>
struct LargestThree {
    uint32_t first, second, third;

    NM_DEVICE explicit LargestThree(const uint32_t* words) {
        uint32_t larger[2], smaller[2];
        NM_UNROLL
        for (int g = 0; g < 2; ++g) {
            const uint32_t a = words[2 * g] & 0x7fff7fffu, b = words[2 * g + 1] & 0x7fff7fffu;
            larger[g] = largest_pair<T>(a, b);
            smaller[g] = smallest_pair<T>(a, b);
        }
        const uint32_t a = low(larger), b = high(larger), c = low(smaller), d = high(smaller);
        const uint32_t rest = smallest_pair<T>(a, b), losers = largest_pair<T>(c, d);
        first = largest_pair<T>(a, b);
        second = largest_pair<T>(rest, losers);
        third = smallest_pair<T>(rest, losers);
    }

  private:
    static NM_DEVICE uint32_t low(const uint32_t* x) { return __byte_perm(x[0], x[1], 0x5410); }
    static NM_DEVICE uint32_t high(const uint32_t* x) { return __byte_perm(x[0], x[1], 0x7632); }
};

}  // namespace nm::cuda
