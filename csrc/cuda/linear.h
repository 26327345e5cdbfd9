// Shared by the kernels of the linear layer: extracting elements from words, and the epilogue of a sum: bias, activation and
// residual in fp32, then the only rounding.
#pragma once

#include "../core/bitpack.h"
#include "../core/dispatch.h"
#include "kernels.h"
#include "launch.h"
#include "memory.h"

namespace nm::cuda {

enum Activation : int { kNone = 0, kGelu = 1, kSilu = 2, kRelu2 = 3 };

// Element `i` of 32-bit words that hold elements of T.
template <class T>
NM_DEVICE float element(const uint32_t* words, int i) {
    if constexpr (sizeof(T) == 4) {
        return bits_float(words[i]);
    } else if constexpr (std::is_same_v<T, bf16>) {
        return bits_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else {
        return to_float(fp16{uint16_t(i % 2 ? words[i / 2] >> 16 : words[i / 2])});
    }
}

NM_DEVICE float activated(float y, int activation) {
    switch (activation) {
        case kGelu: return 0.5f * y * (1.0f + erff(y * 0.70710678118654752f));
        case kSilu: return y / (1.0f + expf(-y));
        case kRelu2: return y <= 0.0f ? 0.0f : y * y;  // NaN stays NaN
        default: return y;
    }
}

// Stores sums: to y [tokens, rows] with bias, activation and residual, or unchanged to the fp32 sums of one part of the columns,
// which finish_parts adds in order.
template <class T>
struct Sums {
    T* y;
    const T* bias;      // [rows] or null
    const T* residual;  // [tokens, rows] or null, added after the activation
    float* parts;       // [part][tokens, rows] or null
    int64_t rows, tokens;
    int activation;

    NM_DEVICE void store(float sum, int64_t token, int64_t row, int part) const {
        const int64_t at = token * rows + row;
        if (parts) {
            parts[part * tokens * rows + at] = sum;
        } else {
            finish(sum, at, row);
        }
    }

    NM_DEVICE void finish(float sum, int64_t at, int64_t row) const {
        if (bias) sum += to_float(bias[row]);
        sum = activated(sum, activation);
        if (residual) sum += to_float(residual[at]);
        y[at] = from_float<T>(sum);
    }
};

template <class T>
Sums<T> sums_of(const LinearCall& call) {
    return {static_cast<T*>(call.y), static_cast<const T*>(call.bias), static_cast<const T*>(call.residual),
            call.splits > 1 ? call.parts : nullptr, call.rows, call.tokens, call.activation};
}

// The sizes of a call, from which its plan is made.
inline LinearCall sizes_of(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors, int bits = 0, int64_t steps = 0) {
    LinearCall call{};
    call.dtype = dtype;
    call.tokens = tokens;
    call.rows = rows;
    call.cols = cols;
    call.n = n;
    call.m = m;
    call.processors = processors;
    call.bits = bits;
    call.steps = steps;
    return call;
}

// Stores the sums of a block of tensor-core results: partial[warp][token][row of 16], of which `sharing` warps have the same rows.
template <class T, class Partial>
NM_DEVICE void store_shared(const Sums<T>& sums, const Partial& partial, int sharing, int64_t block, int part) {
    constexpr int kWarps = int(std::extent_v<Partial>);
    const int rows = 16 * kWarps / sharing;
    for (int e = int(threadIdx.x); e < rows * int(sums.tokens); e += 32 * kWarps) {
        const int token = e / rows, r = e % rows;
        if (block * rows + r >= sums.rows) continue;
        float sum = 0.0f;
        for (int k = 0; k < sharing; ++k) sum += partial[r / 16 * sharing + k][token][r % 16];
        sums.store(sum, token, block * rows + r, part);
    }
}

// Computes y from call.parts if the columns were split.
void finish_parts(const LinearCall& call, const Queue& queue);

}  // namespace nm::cuda
