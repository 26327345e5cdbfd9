// y = x Wᵀ + b for 1 to 4 tokens, W packed with integers of 8 or 4 bits as values, on CUDA cores: the stored integers are converted and
// multiplied in fp32. 2:4 with x in 16 bits is multiplied on tensor cores instead (linear_integers.cu).
//
// The wide variant takes 16 values with one step at once.
#include "linear_few.h"

namespace nm::cuda {

namespace {

// Calls f(element, values, pattern, count of tokens) for the variant that supports a call's sizes.
template <class F>
void by_call(const LinearCall& call, const F& f) {
    check_pattern(call.n, call.m);
    by_dtype(call.dtype, [&](auto element) {
        const auto with = [&](auto values, auto pattern) {
            if (call.tokens == 1) return f(element, values, pattern, std::integral_constant<int, 1>{});
            f(element, values, pattern, std::integral_constant<int, 4>{});
        };
        const auto wide = [&](auto pattern) {
            using P = decltype(pattern);
            if (call.n != P::n || call.m != P::m || call.cols % (P::m / P::n * 16 * call.steps) != 0) return false;
            call.bits == 8 ? with(Integers<8>{}, pattern) : with(Integers<4>{}, pattern);
            return true;
        };
        if (wide(Fixed<2, 4>{}) || wide(Fixed<1, 4>{}) || wide(Fixed<1, 8>{})) return;
        with(Integers<8>{}, Any{call.n, call.m});
    });
}

}  // namespace

int linear_few_integers_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int bits, int64_t steps, int processors) {
    const LinearCall call = sizes_of(dtype, tokens, rows, cols, n, m, processors, bits, steps);
    int splits = 1;
    by_call(call, [&](auto element, auto values, auto pattern, auto count) {
        splits = plan(call, sizes<decltype(element), decltype(values), decltype(pattern), decltype(count)::value>()).splits;
    });
    return splits;
}

void linear_few_integers(const LinearCall& call, const Queue& queue) {
    if (call.rows == 0 || call.tokens == 0) return;
    by_call(call, [&](auto element, auto values, auto pattern, auto count) {
        run<decltype(element), decltype(values), decltype(pattern), decltype(count)::value>(call, queue);
    });
    if (call.splits > 1) finish_parts(call, queue);
}

}  // namespace nm::cuda
