// soft_threshold, and the scale that brings it closest to the weights.
#include "../../core/threshold.h"

#include <algorithm>
#include <vector>

#include "../kernels.h"

namespace nm {
namespace {

constexpr int64_t kSumChunk = 4096;  // elements in one fp64 partial of a sum over a tensor

template <class T, class P>
float threshold_of(const T* w, P p) {
    if (p.n == p.m) return 0.0f;
    uint32_t keys[P::capacity];
    for (int i = 0; i < p.m; ++i) keys[i] = Key<T>::of(w[i]);
    return Key<T>::value(threshold_key(keys, p.n, p.m, Key<T>::bits));
}

struct Products {
    double ws = 0.0, ss = 0.0;
};

// <w, S> and <S, S> over the flat elements [begin, end), left to right; groups may straddle both ends.
template <class T, class P>
Products products(const T* w, P p, int64_t begin, int64_t end) {
    Products sum;
    for (int64_t g = begin / p.m; g * p.m < end; ++g) {
        const T* group = w + g * p.m;
        const float t = threshold_of(group, p);
        const int64_t from = std::max<int64_t>(begin - g * p.m, 0), to = std::min<int64_t>(end - g * p.m, p.m);
        for (int64_t i = from; i < to; ++i) {
            const double s = to_float(shrink(group[i], t));
            sum.ws += double(to_float(group[i])) * s;
            sum.ss += s * s;
        }
    }
    return sum;
}

}  // namespace

namespace NM_ISA {

void soft_threshold(const void* w, int dtype, int64_t numel, int n, int m, void* out, int threads) {
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        const T* in = static_cast<const T*>(w);
        T* to = static_cast<T*>(out);
        parallel_ranges(numel / p.m, p.m, threads, [=](int64_t begin, int64_t end) {
            for (int64_t g = begin; g < end; ++g) {
                const float t = threshold_of(in + g * p.m, p);
                for (int64_t i = g * p.m; i < (g + 1) * p.m; ++i) to[i] = shrink(in[i], t);
            }
        });
    });
}

float soft_threshold_scale(const void* w, int dtype, int64_t numel, int n, int m, int threads) {
    std::vector<Products> partial(size_t((numel + kSumChunk - 1) / kSumChunk));
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        parallel_for(int64_t(partial.size()), threads, [&](int64_t chunk) {
            const int64_t end = std::min(numel, (chunk + 1) * kSumChunk);
            partial[size_t(chunk)] = products(static_cast<const T*>(w), p, chunk * kSumChunk, end);
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
