// The statistics of MaskedAdamW: what a thread gathers, and how a block adds it up, always in the same order.
#pragma once

#include "adamw_table.h"
#include "platform.h"

namespace nm::cuda {

NM_DEVICE uint64_t double_bits(double x) {
    uint64_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

NM_DEVICE double bits_double(uint64_t b) {
    double x;
    memcpy(&x, &b, sizeof x);
    return x;
}

// The product of many positive numbers, as a mantissa in [1, 2) and an exponent: one logarithm in the end instead of many.
struct Product {
    double mantissa = 1.0;
    int exponent = 0;

    // f is in [2^-1000, 2^1000]
    NM_DEVICE void times(double f) {
        const uint64_t bits = double_bits(mantissa * f);
        exponent += int(bits >> 52) - 1023;
        mantissa = bits_double((bits & 0xfffffffffffffu) | (uint64_t(1023) << 52));
    }
    NM_DEVICE double logarithm() const { return log(mantissa) + double(exponent) * 0x1.62e42fefa39efp-1; }
};

struct Tally {
    double change = 0.0, weight = 0.0, grad = 0.0;
    Product log_change;
    uint32_t largest = 0;  // the bits of |u|, which are in the order of magnitudes with NaN above all
    uint32_t unchanged = 0, flips = 0, non_zeros = 0;
};

// Adds terms none of which is negative: in fp32 by a tree, where that overflows each in fp64.
template <int K>
NM_DEVICE void add_terms(double& to, const float* x) {
    float sum[K];
    NM_UNROLL
    for (int i = 0; i < K; ++i) sum[i] = x[i];
    NM_UNROLL
    for (int half = K / 2; half > 0; half /= 2) {
        NM_UNROLL
        for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
    }
    if (is_finite(sum[0])) {
        to += double(sum[0]);
    } else {
        NM_UNROLL
        for (int i = 0; i < K; ++i) to += double(x[i]);
    }
}

// Multiplies changes of v into the product, at least 2^-149 each; at most four at once keep it a normal number.
template <int K>
NM_DEVICE void multiply_terms(Product& to, const float* x) {
    NM_UNROLL
    for (int i = 0; i < K; i += 4) {
        double f = 1.0;
        NM_UNROLL
        for (int j = i; j < i + 4 && j < K; ++j) f = f * double(float_bits(x[j]) ? x[j] : bits_float(1));
        to.times(f);
    }
}

template <int kWarps>
struct WarpSums {
    double value[kWarps][kStats];
};

// partials[k * blocks] = the sum (the last: the largest) of statistic k over the block's threads.
template <int kThreads>
NM_DEVICE void reduce_block(const Tally& t, bool geometric, double* partials, int64_t blocks) {
    NM_SHARED(WarpSums<kThreads / 32>, sums);
    double x[kStats] = {};
    x[kChange] = t.change;
    // the logarithms of infinities and NaN sum to what they sum to themselves
    if (geometric) x[kLogChange] = (double_bits(t.change) >> 52 & 2047) == 2047 ? t.change : t.log_change.logarithm();
    x[kPrunedWeight] = t.weight;
    x[kPrunedGrad] = t.grad;
    NM_UNROLL
    for (int k : {int(kChange), int(kLogChange), int(kPrunedWeight), int(kPrunedGrad)}) {
        NM_UNROLL
        for (int far = 16; far > 0; far /= 2) x[k] += __shfl_xor_sync(~0u, x[k], far);
    }
    x[kUnchanged] = double(__reduce_add_sync(~0u, t.unchanged));
    x[kFlips] = double(__reduce_add_sync(~0u, t.flips));
    x[kNonZeros] = double(__reduce_add_sync(~0u, t.non_zeros));
    x[kLargest] = double(bits_float(__reduce_max_sync(~0u, t.largest)));
    const int thread = int(threadIdx.x);
    if (thread % 32 == 0) {
        NM_UNROLL
        for (int k = 0; k < kStats; ++k) sums.value[thread / 32][k] = x[k];
    }
    __syncthreads();
    if (thread >= kStats) return;
    double result = sums.value[0][thread];
    for (int w = 1; w < kThreads / 32; ++w) {
        const double next = sums.value[w][thread];
        // the bits of positive doubles, and of NaN above them, are in their order
        if (thread == kLargest) {
            result = double_bits(next) > double_bits(result) ? next : result;
        } else {
            result += next;
        }
    }
    partials[thread * blocks] = result;
}

}  // namespace nm::cuda
