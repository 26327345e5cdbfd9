// mask and prune: one pass over contiguous groups.
#include "../../core/rank.h"
#include "../kernels.h"

namespace nm {
namespace {

template <class T, class P>
void mask_one(const T* w, P p, uint8_t* keep) {
    uint32_t keys[P::capacity];
    for (int i = 0; i < p.m; ++i) keys[i] = Key<T>::of(w[i]);
    mask_group(keys, p.n, p.m, Key<T>::bits, keep);
}

}  // namespace

namespace NM_ISA {

void mask(const void* w, int dtype, int64_t numel, int n, int m, uint8_t* out, int threads) {
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        const T* in = static_cast<const T*>(w);
        parallel_ranges(numel / p.m, p.m, threads, [=](int64_t begin, int64_t end) {
            for (int64_t g = begin; g < end; ++g) mask_one(in + g * p.m, p, out + g * p.m);
        });
    });
}

void prune(const void* w, int dtype, int64_t numel, int n, int m, void* out, int threads) {
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        using P = decltype(p);
        const T* in = static_cast<const T*>(w);
        T* to = static_cast<T*>(out);
        parallel_ranges(numel / p.m, p.m, threads, [=](int64_t begin, int64_t end) {
            uint8_t keep[P::capacity];
            for (int64_t g = begin; g < end; ++g) {
                mask_one(in + g * p.m, p, keep);
                for (int i = 0; i < p.m; ++i) to[g * p.m + i] = kept_or_zero(in[g * p.m + i], keep[i]);
            }
        });
    });
}

}  // namespace NM_ISA
}  // namespace nm
