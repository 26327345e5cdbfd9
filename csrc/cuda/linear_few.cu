// y = x Wᵀ + b for 1 to 4 tokens, W packed with floating-point values, on CUDA cores.
#include "linear_few.h"

namespace nm::cuda {

namespace {

// Calls f(element, pattern, count of tokens) for the variant that supports a call's sizes.
template <class F>
void by_call(const LinearCall& call, const F& f) {
    by_dtype_and_pattern(call.dtype, call.n, call.m, [&](auto element, auto pattern) {
        using T = decltype(element);
        using P = decltype(pattern);
        const auto with = [&](auto way) {
            if (call.tokens == 1) return f(element, way, std::integral_constant<int, 1>{});
            if (call.tokens == 2) return f(element, way, std::integral_constant<int, 2>{});
            f(element, way, std::integral_constant<int, 4>{});
        };
        if constexpr (P::capacity != kMaxM) {
            if (call.cols % P::m == 0 && call.cols / P::m * P::n % (16 / int64_t(sizeof(T))) == 0) return with(pattern);
        }
        with(Any{call.n, call.m});
    });
}

}  // namespace

int linear_few_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors) {
    const LinearCall call = sizes_of(dtype, tokens, rows, cols, n, m, processors);
    int splits = 1;
    by_call(call, [&](auto element, auto way, auto count) {
        using T = decltype(element);
        splits = plan(call, sizes<T, Floats<T>, decltype(way), decltype(count)::value>()).splits;
    });
    return splits;
}

void linear_few(const LinearCall& call, const Queue& queue) {
    if (call.rows == 0 || call.tokens == 0) return;
    by_call(call, [&](auto element, auto way, auto count) {
        using T = decltype(element);
        run<T, Floats<T>, decltype(way), decltype(count)::value>(call, queue);
    });
    if (call.splits > 1) finish_parts(call, queue);
}

}  // namespace nm::cuda
