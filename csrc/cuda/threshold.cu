// The scale that makes soft_threshold(w) closest to w: two fp64 sums over the tensor, in an order that depends only on its size.
//
// A block sums one chunk, 4096 elements for common patterns; a final block adds the chunks' sums and divides. No synchronisation,
// and independent of block order.
#include "../core/dispatch.h"
#include "../core/registers.h"
#include "../core/threshold.h"
#include "any_groups.h"
#include "kernels.h"
#include "launch.h"
#include "memory.h"
#include "threshold_pairs.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256, kChunk = 4096;
constexpr int kEach = kChunk / kThreads;  // elements of a thread
static_assert(AnyTile::kThreads == kThreads);

struct Products {
    double ws, ss;

    // Products of fp32 numbers are exact in fp64.
    NM_DEVICE void add(float w, float s) {
        ws = fma(double(w), double(s), ws);
        ss = fma(double(s), double(s), ss);
    }
};

// The sum over a block's threads, in thread 0: neighbours first, then their warps.
NM_DEVICE Products block_sum(Products own) {
    using Partials = Products[kThreads / 32];
    NM_SHARED(Partials, partials);
    NM_UNROLL
    for (int by = 1; by < 32; by *= 2) {
        own.ws += __shfl_xor_sync(~0u, own.ws, by);
        own.ss += __shfl_xor_sync(~0u, own.ss, by);
    }
    if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = own;
    __syncthreads();
    Products sum{};
    for (int i = 0; i < kThreads / 32 && threadIdx.x == 0; ++i) {
        sum.ws += partials[i].ws;
        sum.ss += partials[i].ss;
    }
    return sum;
}

template <class T, class P>
__global__ void __launch_bounds__(kThreads) scale_sums_kernel(const T* w, Products* sums, int64_t numel, bool wide) {
    constexpr int kPiece = P::m * int(sizeof(T)) > 16 ? P::m : 16 / int(sizeof(T));  // whole groups, 16 bytes at least
    T x[kEach];
    const int64_t first = int64_t(blockIdx.x) * kChunk + int64_t(threadIdx.x) * kPiece;
    NM_UNROLL
    for (int i = 0; i < kEach; i += kPiece) {
        const int64_t at = first + int64_t(i) * kThreads;
        load_some<kPiece>(w + at, x + i, numel - at, wide);
    }
    Products own{};
    if constexpr (sizeof(T) == 2 && P::m == 4 && P::n <= 2) {
        // elements below the threshold add nothing, and s has the sign of w
        uint32_t words[kEach / 2];
        memcpy(words, x, sizeof words);
        NM_UNROLL
        for (int i = 0; i < kEach / 2; i += 4) {
            const LargestThree<T> largest(words + i);
            const uint32_t w[2] = {largest.first, largest.second}, t = P::n == 1 ? largest.second : largest.third;
            NM_UNROLL
            for (int k = 0; k < P::n; ++k) {
                const uint32_t s = difference_pair<T>(w[k], t);
                own.add(low_half<T>(w[k]), low_half<T>(s));
                own.add(high_half<T>(w[k]), high_half<T>(s));
            }
        }
    } else {
        NM_UNROLL
        for (int i = 0; i < kEach; i += P::m) {
            uint32_t keys[P::m];
            NM_UNROLL
            for (int j = 0; j < P::m; ++j) keys[j] = Key<T>::of(x[i + j]);
            const float t = Key<T>::value(threshold_key<P::n, P::m>(keys));
            NM_UNROLL
            for (int j = 0; j < P::m; ++j) own.add(to_float(x[i + j]), to_float(shrink(x[i + j], t)));
        }
    }
    const Products sum = block_sum(own);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Groups of any size; a chunk is a tile.
template <class T>
__global__ void __launch_bounds__(kThreads) any_scale_sums_kernel(const T* w, Products* sums, int64_t groups, int n, int m) {
    NM_SHARED(AnyTile, tile);
    const int here = tile.load(w, groups, m);
    if (n < m) tile.find_thresholds(here, n, m, Key<T>::bits);
    const T* const mine = w + tile.first_group(m) * m;
    Products own{};
    for (int e = int(threadIdx.x); e < here; e += kThreads) {
        own.add(to_float(mine[e]), to_float(shrink(mine[e], n < m ? Key<T>::value(tile.thresholds[e / m]) : 0.0f)));
    }
    const Products sum = block_sum(own);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) scale_kernel(const Products* sums, float* scale, int64_t chunks) {
    Products own{};
    for (int64_t i = threadIdx.x; i < chunks; i += kThreads) {
        own.ws += sums[i].ws;
        own.ss += sums[i].ss;
    }
    const Products sum = block_sum(own);
    if (threadIdx.x == 0) *scale = sum.ss == 0.0 ? 0.0f : float(sum.ws / sum.ss);
}

}  // namespace

int64_t soft_threshold_chunks(int64_t numel, int n, int m) {
    int64_t chunks = 0;
    by_pattern(n, m, [&](auto pattern) {
        constexpr bool any = decltype(pattern)::capacity == kMaxM;
        chunks = any ? cdiv(numel / m, AnyTile::groups(m)) : cdiv(numel, kChunk);
    });
    return chunks;
}

void soft_threshold_scale(const void* w, int dtype, int64_t numel, int n, int m, void* sums, float* scale, const Queue& queue) {
    const int64_t chunks = soft_threshold_chunks(numel, n, m);
    const auto partial = static_cast<Products*>(sums);
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto pattern) {
        using T = decltype(element);
        using P = decltype(pattern);
        const auto from = static_cast<const T*>(w);
        if constexpr (P::capacity == kMaxM) {
            launch("scale_sums_kernel", any_scale_sums_kernel<T>, {chunks, kThreads}, queue, from, partial, numel / m, n, m);
        } else {
            launch("scale_sums_kernel", scale_sums_kernel<T, P>, {chunks, kThreads}, queue, from, partial, numel, multiples_of_16(from));
        }
    });
    launch("scale_kernel", scale_kernel, {1, kThreads}, queue, partial, scale, chunks);
}

}  // namespace nm::cuda
