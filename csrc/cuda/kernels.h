// The host side of csrc/cuda: each function checks nothing but what the hardware limits, starts its kernels on a queue
// and returns at once. Pointers are device memory (the host's in the emulator), tensors contiguous and row-major, groups m
// consecutive elements of a row; m divides the row length unless said otherwise. Dtype codes are those of core/dispatch.h.
#pragma once

#include <cstdint>

#include "queue.h"

namespace nm::cuda {

// groups.cu ------------------------------------------------------------------------------------------------------------

// out[i] = 1 where w[i] is among the n largest magnitudes of its group.
void mask(const void* w, int dtype, int64_t numel, int n, int m, uint8_t* out, Queue queue);

// out = w where kept, +0.0 elsewhere; out may be w.
void prune(const void* w, int dtype, int64_t numel, int n, int m, void* out, Queue queue);

// out = sign(w) max(|w| - t, 0), t the (n+1)-th largest magnitude of the group; out may be w.
void soft_threshold(const void* w, int dtype, int64_t numel, int n, int m, void* out, Queue queue);

// threshold.cu, transposable.cu ----------------------------------------------------------------------------------------

// Pairs of fp64 sums that soft_threshold_scale leaves in its scratch memory.
int64_t soft_threshold_chunks(int64_t numel, int n, int m);

// *scale = <w, S> / <S, S> of S = soft_threshold(w), 0 where S is zero; `sums`: 16 bytes for each of soft_threshold_chunks.
void soft_threshold_scale(const void* w, int dtype, int64_t numel, int n, int m, void* sums, float* scale, Queue queue);

// out[i] = 1 where w[i] is kept by the best 2:4 mask of its 4x4 tile; rows and cols are multiples of 4.
void transposable_mask(const void* w, int dtype, int64_t rows, int64_t cols, uint8_t* out, Queue queue);

// compress.cu, decompress.cu, pack.cu ----------------------------------------------------------------------------------

// mvue.cu --------------------------------------------------------------------------------------------------------------

// adamw.cu -------------------------------------------------------------------------------------------------------------

// linear_few.cu, linear_mma.cu -----------------------------------------------------------------------------------------

// y [tokens, rows] = activation(x Wᵀ + bias) with x [tokens, cols] and W (rows, cols) packed; cols may end inside the last
// group. Everything is accumulated in fp32 and rounded once. Indices are not checked; one that is outside of its group
// reads nothing outside of x.
struct LinearCall {
    const void *x, *values;
    const uint8_t* indices;
    const void* bias;  // [rows] or null
    void* y;
    float* parts;  // [splits, tokens, rows], only where splits > 1
    int dtype, activation;
    int64_t tokens, rows, cols;
    int n, m;
    int splits;      // what linear_few_splits says
    int processors;  // multiprocessors to fill
};

// 1 to 4 tokens on CUDA cores, any pattern.
void linear_few(const LinearCall& call, Queue queue);

// Into how many parts linear_few cuts the columns of a call.
int linear_few_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors);

}  // namespace nm::cuda
