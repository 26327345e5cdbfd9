// soft_threshold, and the scale that brings it closest to the weights.
#include "../../core/threshold.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../kernels.h"
#include "../stream.h"
#include "patterns.h"
#include "shrink.h"
#include "spans.h"

namespace nm {
namespace {

constexpr int64_t kSumChunk = 4096;  // elements in one fp64 partial of a sum over a tensor
constexpr int64_t kSumPiece = 256;   // of them shrunk and added at a time

// out = soft_threshold(w) for `count` elements, whole groups.
template <class T>
using ShrinkFn = void(const T* w, int64_t count, int n, int m, T* out);

// The threshold of a group is the largest key that it does not keep.
template <int M, class T>
Keys64<T> largest_left(const T* w, Keys64<T> keys, int n) {
    keys.remove(keep_some<M>(w, n));
    return keys.template largest<M>();
}

// n < M; N is 0 where the compiler does not know the pattern.
template <int N, int M, class T>
void shrink_word(const T* w, int n, T* out) {
    const Keys64<T> keys = Keys64<T>::of(w);
    if constexpr (N > 0 && M <= Keys64<T>::kLargestNth) {
        shrink64(w, keys, keys.template nth<M, N + 1>(), out);
    } else {
        shrink64(w, keys, largest_left<M>(w, keys, n), out);
    }
}

template <int N, int M, class T>
void shrink_words(const T* w, int64_t count, int n, int, T* out) {
    const int64_t whole = count / 64 * 64, rest = count - whole;
    for (int64_t at = 0; at < whole; at += 64) {
        prefetch64(w + at);
        shrink_word<N, M>(w + at, n, out + at);
    }
    if (rest == 0) return;
    T padded[64] = {}, result[64];
    std::memcpy(static_cast<void*>(padded), w + whole, size_t(rest) * sizeof(T));
    shrink_word<N, M>(padded, n, result);
    std::memcpy(static_cast<void*>(out + whole), result, size_t(rest) * sizeof(T));
}

template <class T>
void shrink_groups(const T* w, int64_t count, int n, int m, T* out) {
    uint32_t keys[kMaxM];
    for (int64_t at = 0; at < count; at += m) {
        for (int i = 0; i < m; ++i) keys[i] = Key<T>::of(w[at + i]);
        const float t = n == m ? 0.0f : Key<T>::value(threshold_key(keys, n, m, Key<T>::bits));
        for (int i = 0; i < m; ++i) out[at + i] = shrink(w[at + i], t);
    }
}

template <class T>
ShrinkFn<T>* shrink_fn(int n, int m) {
    check_pattern(n, m);
    if (n == m) return shrink_groups<T>;
    return for_pattern<ShrinkFn<T>>(
        n, m, [](auto N, auto M) -> ShrinkFn<T>* { return shrink_words<N, M, T>; },
        [](auto M) -> ShrinkFn<T>* { return shrink_words<0, M, T>; }, shrink_groups<T>);
}

struct Products {
    double ws = 0.0, ss = 0.0;
};

double total(double* lanes) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

// Adds the products of `count` elements, a multiple of 64 but for the last call.
template <class T>
void add_products(const T* w, const T* s, int64_t count, DotSums& dots) {
    const int64_t whole = count / 64 * 64;
    for (int64_t at = 0; at < whole; at += 64) dots.add64(w + at, s + at);
    if (whole == count) return;
    T a[64] = {}, b[64] = {};
    std::memcpy(static_cast<void*>(a), w + whole, size_t(count - whole) * sizeof(T));
    std::memcpy(static_cast<void*>(b), s + whole, size_t(count - whole) * sizeof(T));
    dots.add64(a, b);
}

// <w, S> and <S, S> over the elements from begin to end. Where groups divide words a few words are shrunk at a
// time, so that memory never waits for the products; else all at once, as groups may straddle both ends.
template <class T>
Products products(const T* w, int64_t begin, int64_t end, int n, int m, ShrinkFn<T>* shrink_span) {
    T shrunk[kSumChunk + 2 * kMaxM];
    const int64_t step = 64 % m == 0 ? kSumPiece : kSumChunk;
    DotSums dots;
    for (int64_t at = begin; at < end; at += step) {
        const int64_t stop = std::min(end, at + step), first = at / m * m, last = (stop + m - 1) / m * m;
        shrink_span(w + first, last - first, n, m, shrunk);
        add_products(w + at, shrunk + (at - first), stop - at, dots);
    }
    double ws[16], ss[16];
    dots.lanes(ws, ss);
    return {total(ws), total(ss)};
}

}  // namespace

namespace NM_ISA {

void soft_threshold(const void* w, int dtype, int64_t numel, int n, int m, void* out, int threads) {
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const T* in = static_cast<const T*>(w);
        T* to = static_cast<T*>(out);
        ShrinkFn<T>* const shrink_span = shrink_fn<T>(n, m);
        const int64_t span = span_of(m);
        const bool streamed = numel * int64_t(sizeof(T)) >= kStreamBytes;
        parallel_ranges((numel + span - 1) / span, span, threads, [=](int64_t first, int64_t last) {
            alignas(64) T buffer[kMaxSpan];
            each_span(first, last, span, numel, [&](int64_t at, int64_t count) {
                shrink_span(in + at, count, n, m, streamed ? buffer : to + at);
                if (streamed) stream(to + at, buffer, count * int64_t(sizeof(T)));
            });
            if (streamed) stream_fence();
        });
    });
}

float soft_threshold_scale(const void* w, int dtype, int64_t numel, int n, int m, int threads) {
    std::vector<Products> partial(size_t((numel + kSumChunk - 1) / kSumChunk));
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const T* in = static_cast<const T*>(w);
        ShrinkFn<T>* const shrink_span = shrink_fn<T>(n, m);
        parallel_for(int64_t(partial.size()), threads, [&](int64_t chunk) {
            const int64_t begin = chunk * kSumChunk, end = std::min(numel, begin + kSumChunk);
            partial[size_t(chunk)] = products(in, begin, end, n, m, shrink_span);
        });
    });
    Products sum;
    for (const Products& one : partial) {
        sum.ws += one.ws;
        sum.ss += one.ss;
    }
    return sum.ss == 0.0 ? 0.0f : float(sum.ws / sum.ss);
}

}  // namespace NM_ISA
}  // namespace nm
