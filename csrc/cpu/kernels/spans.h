// Long runs of groups, cut into spans that hold whole groups and whole 64-bit words and stay in the cache: first one bit
// for every element says whether it is kept, then all else follows from the bits, in the same way for every pattern.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "../../core/types.h"

namespace nm {

constexpr int64_t kSpan = 1024;                    // elements in a span, more where the pattern needs it
constexpr int64_t kMaxSpan = 64 * int64_t(kMaxM);  // lcm(64, m) at most
constexpr int kAhead = 4096;                       // bytes between what is worked on and what is fetched

inline int64_t span_of(int m) {
    const int64_t whole = std::lcm(64, m);
    return whole * std::max<int64_t>(1, kSpan / whole);
}

// f(begin, count) for the spans of `total` elements between the numbers first and last.
template <class F>
void each_span(int64_t first, int64_t last, int64_t span, int64_t total, const F& f) {
    for (int64_t i = first; i < last; ++i) f(i * span, std::min(span, total - i * span));
}

// Fetches 64 elements that will be needed soon: while a span is built and stored the processor would fetch nothing by
// itself. Worth a fifth of the time where memory is the limit (Zen 5, 2026-11-21). An address past the end does no harm.
template <class T>
inline void prefetch64(const T* w) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(w) + kAhead;
    for (int line = 0; line < int(sizeof(T)); ++line) __builtin_prefetch(reinterpret_cast<const char*>(at + 64 * line));
}

// Bit i of bits: w[i] is kept, for `count` elements, whole groups; the bits after them in the last word are 0.
template <class T>
using SelectFn = void(const T* w, int64_t count, int n, int m, uint64_t* bits);

#if defined(NM_ISA)
namespace NM_ISA {

// The function for a pattern.
template <class T>
SelectFn<T>* select_fn(int n, int m);

}  // namespace NM_ISA
#endif

}  // namespace nm
