// Adds the sums of a linear layer whose columns were split into parts.
#include "linear.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) finish_kernel(Sums<T> sums, int splits) {
    const int64_t count = sums.tokens * sums.rows, at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= count) return;
    float sum = sums.parts[at];
    for (int part = 1; part < splits; ++part) sum += sums.parts[part * count + at];
    sums.finish(sum, at, at % sums.rows);
}

}  // namespace

void finish_parts(const LinearCall& call, const Queue& queue) {
    by_dtype(call.dtype, [&](auto element) {
        using T = decltype(element);
        launch("linear_finish_kernel", finish_kernel<T>, {cdiv(call.tokens * call.rows, kThreads), kThreads}, queue, sums_of<T>(call), call.splits);
    });
}

}  // namespace nm::cuda
