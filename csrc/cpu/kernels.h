// Every kernel of the CPU core, as function types: each is compiled once per instruction set (isa.h) from the same
// sources in kernels/, as nm::portable::mask, nm::avx2::mask and so on, and called through the table of the active set.
//
// Tensors are contiguous, row-major, passed as pointer, dtype code and sizes; groups are m consecutive elements of a row,
// and m divides the row length unless said otherwise.
#pragma once

#include <cstdint>
#include <vector>

#include "../core/dispatch.h"
#include "parallel.h"

namespace nm {

// mask[i] = 1 where w[i] is among the n largest magnitudes of its group.
using MaskFn = void(const void* w, int dtype, int64_t numel, int n, int m, uint8_t* out, int threads);

// out = w where kept, +0.0 elsewhere; out may be w.
using PruneFn = void(const void* w, int dtype, int64_t numel, int n, int m, void* out, int threads);

// out = sign(w) max(|w| - t, 0), t the (n+1)-th largest magnitude of the group; out may be w.
using SoftThresholdFn = void(const void* w, int dtype, int64_t numel, int n, int m, void* out, int threads);

// <w, S> / <S, S> with S = soft_threshold(w), 0 when S is zero; fp64 partials over 4096-element chunks, added in order.
using SoftThresholdScaleFn = float(const void* w, int dtype, int64_t numel, int n, int m, int threads);

// n:m along rows and columns of every m x m tile; m divides rows and cols (several matrices: stack them).
using TransposableMaskFn = void(const void* w, int dtype, int64_t rows, int64_t cols, int n, int m, uint8_t* out, int threads);

// values [rows, cols/m*n] and packed indices; `mask` is of bools, or null. False: it keeps more than n in a group.
using CompressFn = bool(const void* w, int dtype, int64_t rows, int64_t cols, int n, int m, const uint8_t* mask, void* values, uint8_t* indices,
              int threads);

// The inverse; cols may end inside the last group. False: an index is not below m.
using DecompressFn = bool(const void* values, const uint8_t* indices, int dtype, int64_t rows, int64_t cols, int n, int m, void* out, int threads);

// x [tokens, cols], W compressed [rows, cols], bias [rows] or null, y [tokens, rows].
struct LinearCall {
    const void *x, *values;
    const uint8_t* indices;
    const void* bias;
    void* y;
    int64_t rows, cols;
};

// y = x Wᵀ + bias, by the kernel that is fastest for this number of tokens. False: an index is not below m.
using LinearFn = bool(LinearCall call, int64_t tokens, int dtype, int n, int m, int threads);

// Values as integers of `bits`: 8, or 4 with two in a byte, the earlier one low, each row starting on a byte. The kept values of a row
// are `steps` equal runs, each with a step; a weight is integer * step.
struct Integers {
    const void* values;
    const bf16* step;  // [rows, steps]
    int64_t rows, kept, steps;
    int bits;
};

// y [tokens, rows] = x Wᵀ + bias, x [tokens, cols] and bias [rows] of `dtype`, y of `y_dtype`: that one or fp32.
struct IntegersLinearCall {
    const void* x;
    Integers weight;
    const uint8_t* indices;
    const void* bias;  // or null
    void* y;
    int64_t cols, tokens;
    int dtype, y_dtype;
};

// Only stored values are multiplied. False: an index is not below m.
using LinearIntegersFn = bool(const IntegersLinearCall& call, int n, int m, int threads);

// The inverse of rounding: integer * step, exact in fp32, rounded once to `dtype`.
using DequantizeValuesFn = void(const Integers& integers, int dtype, void* values, int threads);

// The integers of values [rows, kept] as Integers has them, and their steps.
using QuantizeValuesFn = void(const void* w, int dtype, int64_t rows, int64_t kept, int64_t steps, int bits, void* values, bf16* step, int threads);

// C [rows, tokens] = A B (+ bias of each row), A compressed [rows, cols], B [cols, tokens]. Element (k, t) of B is
// b[k * b_row + t * b_col], one of the strides being 1; C likewise.
struct SpmmCall {
    const void* values;
    const uint8_t* indices;
    const void* b;
    int64_t b_row, b_col;
    const void* bias;  // or null; needs c_row == 1
    void* c;
    int64_t c_row, c_col;
    int64_t rows, cols, tokens;
};

// The same products as LinearFn's and wgrad's, meant for many tokens. False: an index is not below m.
using SpmmFn = bool(const SpmmCall& call, int dtype, int n, int m, int threads);

// C [cols, tokens] = Aᵀ B, B [rows, tokens], without bias: dgrad.
using SpmmTransposedFn = SpmmFn;

// The same two products in bf16, made for AMX and AVX512-BF16; other sets compute the same without them. Most are done from
// dense tiles that are expanded block by block inside the cache: zeros are multiplied too, so an inf or NaN of B may reach all
// results of its token. Numbers below 2^-126 may count as zero. The second product is without bias.
using Bf16SpmmFn = bool(const SpmmCall& call, int n, int m, int threads);

// g [outer, length, inner] with groups along `length`, zero-padded to whole groups.
struct MvueCall {
    const void* g;
    int64_t outer, length, inner;
    uint64_t seed, offset;
    bool approx;
};

// Unbiased estimate of g in the layout of g.
using MvueFn = void(const MvueCall& call, int dtype, int n, int m, void* out, int threads);

// The same, compressed: rows are outer*inner.
using MvueCompressFn = void(const MvueCall& call, int dtype, int n, int m, void* values, uint8_t* indices, int threads);

// One 2-D tensor of any strides, in elements; groups run along its second dimension.
struct View {
    void* data = nullptr;
    int dtype = kFloat32;
    int64_t row_stride = 0, col_stride = 0;

    explicit operator bool() const { return data != nullptr; }
};

// One parameter and what belongs to it, all rows x cols. `top`, the maximum of v, is absent without amsgrad.
struct AdamWParam {
    int64_t rows = 0, cols = 0;
    View p, grad, avg, sq, top;
    float* step = nullptr;
    const uint8_t* mask = nullptr;  // held: bit c % 8 of byte c / 8 of its row, rows of (cols + 7) / 8 bytes
};

struct AdamWCall {
    const double* hyper;  // lr, beta1, beta2, eps, weight_decay, decay, v_step, clamp
    int n, m;             // 0, 0: no masks, or held ones
    bool frozen, eps_inside, maximize, geometric;
    bool held, fixed;     // whether params have held masks, and whether weights outside of these stay zero
    const float *grad_scale, *found_inf;  // or null
};

// One step of every parameter, in place; stats[9] as nmkernels/reference/adamw.py lists them.
using MaskedAdamWFn = void(const std::vector<AdamWParam>& params, const AdamWCall& call, double* stats, int threads);

// A hash of the bytes: equal for equal bytes, with any number of threads and under every instruction set.
using FingerprintFn = uint64_t(const void* data, int64_t bytes, int threads);

// One instruction set's kernels.
struct Kernels {
    MaskFn* mask;
    PruneFn* prune;
    SoftThresholdFn* soft_threshold;
    SoftThresholdScaleFn* soft_threshold_scale;
    TransposableMaskFn* transposable_mask;
    CompressFn* compress;
    DecompressFn* decompress;
    LinearFn* linear;
    SpmmFn* spmm;
    SpmmTransposedFn* spmm_transposed;
    Bf16SpmmFn *bf16_spmm, *bf16_spmm_transposed;
    bool bf16_dots;  // whether the processor multiplies bf16, so that these two are the fast ones
    MvueFn* mvue;
    MvueCompressFn* mvue_compress;
    MaskedAdamWFn* masked_adamw;
    FingerprintFn* fingerprint;
    LinearIntegersFn* linear_integers;
    DequantizeValuesFn* dequantize_values;
    QuantizeValuesFn* quantize_values;
};

// NM_ISA is the name of the set that this file is being compiled for; files that are compiled once do not have it. A set that
// has only some kernels of its own takes the others from NM_BASE_ISA.
#if defined(NM_ISA)
#if !defined(NM_BASE_ISA)
#define NM_BASE_ISA NM_ISA
#endif
namespace NM_BASE_ISA {
MaskFn mask;
PruneFn prune;
SoftThresholdFn soft_threshold;
SoftThresholdScaleFn soft_threshold_scale;
TransposableMaskFn transposable_mask;
CompressFn compress;
DecompressFn decompress;
LinearFn linear;
SpmmFn spmm;
SpmmTransposedFn spmm_transposed;
Bf16SpmmFn bf16_pairs;  // of AVX512-BF16 alone; false also where indices do not ascend, and for other patterns: C is not right then
MvueFn mvue;
MvueCompressFn mvue_compress;
MaskedAdamWFn masked_adamw;
FingerprintFn fingerprint;
DequantizeValuesFn dequantize_values;
QuantizeValuesFn quantize_values;
}  // namespace NM_BASE_ISA
namespace NM_ISA {
using namespace NM_BASE_ISA;
Bf16SpmmFn bf16_spmm, bf16_spmm_transposed;
LinearIntegersFn linear_integers;
}  // namespace NM_ISA
#endif

}  // namespace nm
