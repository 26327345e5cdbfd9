// The host side of csrc/cuda: each function checks nothing but what the hardware limits, starts its kernels on a queue
// and returns at once. Pointers are device memory (the host's in the emulator), tensors contiguous and row-major, groups m
// consecutive elements of a row; m divides the row length unless said otherwise. Dtype codes are those of core/dispatch.h.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "queue.h"

namespace nm::cuda {

// probe.cu; not in the emulator ----------------------------------------------------------------------------------------

// Versions of CUDA, 13020 is 13.2: the newest that the driver runs (0: no driver), and the runtime's that is linked here. What
// keeps kernels from running on a device, in CUDA's words; empty where nothing does.
struct Probe {
    int driver, runtime;
    std::string error;
};

Probe probe(int device);

// What plans ask of a GPU; the driver is asked once.
struct Gpu {
    int capability;    // 90 is 9.0
    int processors;    // multiprocessors
    int shared;        // bytes of shared memory that a block can have
    int clock;         // kHz, the highest
    int memory_clock;  // kHz; two transfers each
    int memory_bits;   // of a transfer
};

const Gpu& gpu(int device);

// groups.cu ------------------------------------------------------------------------------------------------------------

// out[i] = 1 where w[i] is among the n largest magnitudes of its group.
void mask(const void* w, int dtype, int64_t numel, int n, int m, uint8_t* out, const Queue& queue);

// out = w where kept, +0.0 elsewhere; out may be w.
void prune(const void* w, int dtype, int64_t numel, int n, int m, void* out, const Queue& queue);

// out = sign(w) max(|w| - t, 0), t the (n+1)-th largest magnitude of the group; out may be w.
void soft_threshold(const void* w, int dtype, int64_t numel, int n, int m, void* out, const Queue& queue);

// threshold.cu, transposable.cu ----------------------------------------------------------------------------------------

// Pairs of fp64 sums that soft_threshold_scale leaves in its scratch memory.
int64_t soft_threshold_chunks(int64_t numel, int n, int m);

// *scale = <w, S> / <S, S> of S = soft_threshold(w), 0 where S is zero; `sums`: 16 bytes for each of soft_threshold_chunks.
void soft_threshold_scale(const void* w, int dtype, int64_t numel, int n, int m, void* sums, float* scale, const Queue& queue);

// out[i] = 1 where w[i] is kept by the best 2:4 mask of its 4x4 tile; rows and cols are multiples of 4.
void transposable_mask(const void* w, int dtype, int64_t rows, int64_t cols, uint8_t* out, const Queue& queue);

// pack.cu (compress.cu, pack_tiles.cu, pack_any.cu), decompress.cu -----------------------------------------------------

// What of a weight is wanted; no values: it is not.
struct Packed {
    void* values;
    void* indices;  // or metadata
};

// A weight (rows, cols), row-major. `by_row` is W packed along its rows, `by_column` its transpose, `dense` W as decompressed rows.
struct Pack {
    const void* w;
    const uint8_t* mask;  // bool, where select is given
    const float* scale;   // one number, for the threshold; null: multiply nothing
    int* overfull;        // set to 1 where a given mask keeps more than n of a group
    Packed by_row, by_column;
    int64_t rows, cols;
    int n, m, dtype, out_dtype, select, layout;  // codes of packing.h
    void* dense = nullptr;                       // null: not wanted
};

// False, with nothing written: the transposable mask must be made first, the layout be made of canonical indices, or the dense form
// be made by another call, because no kernel does it at once for this pattern, shape, alignment or pair of dtypes.
bool pack(const Pack& call, const Queue& queue);

// A row's last group may go on beyond its end. An index that is not below m writes nothing.
void decompress(const void* values, const void* indices, int dtype, int64_t rows, int64_t cols, int n, int m, void* out, const Queue& queue);

// dequantize.cu --------------------------------------------------------------------------------------------------------

// Integers of 8 or 4 bits times their step, as out [rows, kept] of a float dtype: exact in fp32, rounded once. steps divide kept.
void dequantize(const void* values, const void* step, int64_t rows, int64_t kept, int64_t steps, int bits, int dtype, void* out, const Queue& queue);

// quantize.cu ----------------------------------------------------------------------------------------------------------

// x (rows, cols) in 8 bits: each element times its scale, to nearest even; dtype codes kE4m3, kE5m2, kInt8.
struct Quantize {
    const void* x;
    const float* scale;  // one number, or with by_row one for each row of the result
    void* values;
    int64_t rows, cols;
    int dtype, out_dtype;
    bool by_row, transposed;
};

// values (rows, cols), or (cols, rows) where transposed.
void quantize(const Quantize& call, const Queue& queue);

// The largest two of each four of a row: values (rows, cols/2) and metadata in the order of 8-bit operands. rows are a multiple of 64,
// cols of 128, x and values at multiples of 16 bytes.
void quantize_pack(const Quantize& call, uint32_t* metadata, const Queue& queue);

// mvue.cu --------------------------------------------------------------------------------------------------------------

// The unbiased estimate along the middle of g [outer, length, inner], dense. seed: (seed, offset), in device memory. approx: n = 2.
void mvue(const void* g, int dtype, int64_t outer, int64_t length, int64_t inner, int n, int m, const int64_t* seed, bool approx, void* out,
          const Queue& queue);

// The same packed, as rows [outer, inner] of `length` padded to whole groups. `ordered`: indices are metadata in the order of wgmma.sp.
// Returns false, and does nothing, where no kernel writes that: it takes exact 2:4 in 16 bits, an `inner` of whole 64, a `length` of
// whole 128, and addresses of whole 16 bytes.
bool mvue_compress(const void* g, int dtype, int64_t outer, int64_t length, int64_t inner, int n, int m, const int64_t* seed, bool approx,
                   void* values, uint8_t* indices, bool ordered, const Queue& queue);

// adamw.cu -------------------------------------------------------------------------------------------------------------

struct AdamWTables;   // of adamw_table.h, as the next two
struct AdamWPart;
struct AdamWOptions;

// How params are cut: each row into pieces of so many columns, and `pieces` of these make a tile.
struct AdamWCut {
    int columns, pieces;
    bool flat;  // whether flat params have a launch of their own
};

AdamWCut adamw_cut(int n, int m);

// One step of the params of a table, rows of AdamWParam. n = m = 0: no masks, or those of the table.
struct AdamWArguments {
    const int64_t* table;
    const int64_t* gradients;  // addresses, one for each param
    const int32_t* owners;     // as adamw_owners wrote them
    uint32_t* scalars;         // scratch: 64 bytes for each param
    double* partials;          // scratch: 9 for each block
    double* stats;             // 9, written
    int64_t params;
    const double* hyper;       // on the device; null: take host_hyper
    double host_hyper[8];      // in the arguments
    const int64_t* counts;     // step counts on the host, one for each param; null: take count
    int64_t count;             // the step count of all params
    int n, m;
};

// Three launches for any number of params if all are flat or none is, else four.
void masked_adamw(const AdamWArguments& arguments, const AdamWPart& flat, const AdamWPart& other, const AdamWOptions& options, const Queue& queue);

// Its main launch.
void adamw_step(const AdamWTables& tables, const AdamWPart& part, bool flat, const AdamWOptions& options, int n, int m, const Queue& queue);

// owners[b] = the row of the table that block b begins with.
void adamw_owners(const int64_t* table, int64_t params, const AdamWPart& flat, const AdamWPart& other, int32_t* owners, const Queue& queue);

// to[i] = words[i], captured by value in a CUDA graph.
void upload_words(const std::vector<int64_t>& words, int64_t* to, const Queue& queue);

// linear_few.cu, linear_few_integers.cu, linear_integers.cu, linear_mma.cu, linear_expand.cu ---------------------------

// y [tokens, rows] = activation(x Wᵀ + bias) + residual with x [tokens, cols] and W (rows, cols) packed; cols may end inside the last
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
    int splits;      // what the kernel's function linear_..._splits says
    int processors;  // multiprocessors to fill
    const void* residual = nullptr;  // [tokens, rows]
    const void* step = nullptr;      // integers as values: bf16 [rows, steps], each of equal parts of a row
    int64_t steps = 0;
    int bits = 0;  // of an integer, 8 or 4; 0: values are floating-point
};

// 1 to 4 tokens on CUDA cores, any pattern.
void linear_few(const LinearCall& call, const Queue& queue);

// Into how many parts linear_few cuts the columns of a call.
int linear_few_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors);

// The same with integers as values, which are converted and multiplied in fp32.
void linear_few_integers(const LinearCall& call, const Queue& queue);

int linear_few_integers_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int bits, int64_t steps, int processors);

// 1 to 16 tokens in 16 bits on sparse tensor cores, 2:4 with integers as values; x is rounded to 16 bits of the largest of each 128
// columns. x, values and indices at multiples of 16 bytes. Indices out of order give undefined results. An inf or NaN of a token reaches a
// result only through a stored value.
void linear_integers(const LinearCall& call, const Queue& queue);

// The same for linear_integers; 0 where it has no kernel: it takes whole 128 columns, also for each step.
int linear_integers_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int bits, int64_t steps, int processors);

// 1 to 16 tokens in 16 bits on tensor cores; x and values at multiples of 16 bytes, indices of 4. The dense product of the
// expanded weight: inf and NaN of a token reach all of its results.
void linear_mma(const LinearCall& call, const Queue& queue);

// The same for linear_mma, with the bytes of shared memory that a block can have; 0 where it has no kernel for a dtype, pattern and size.
int linear_mma_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors, int shared);

// 1 to 16 tokens in 16 bits on tensor cores, for every pattern and any addresses.
void linear_expand(const LinearCall& call, const Queue& queue);

// The same for linear_expand; 0 for other dtypes and more tokens.
int linear_expand_splits(int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors);

// gemm/ ----------------------------------------------------------------------------------------------------------------

// D = A B in 16 bits on sparse tensor cores: A (m, k) at 2:4, as values and metadata; B dense, [n, k], or with
// `by_column` [k, n]. D is stored [n, m], as activation(D + bias of a row) + residual; with by_column [m, n], plain. m is a
// multiple of 16, k of 64, n with by_column of 8, all pointers of 16 bytes. Metadata is not checked: out of order, results
// are undefined. An inf or NaN of B reaches a result only through a stored value.
struct GemmCall {
    const void* values;
    const uint32_t* metadata;
    const void* dense;
    const void* bias;      // [m] or null
    const void* residual;  // [n, m] or null
    void* out;
    float* parts;  // [splits] x D, only where splits > 1; or the workspace of stream-K
    int dtype, activation;
    int64_t m, n, k;
    bool by_column;
    int warps;         // 1: metadata "mma.sp"; 4: "wgmma.sp", m a multiple of 64
    int tile, splits;  // of gemm_plan; splits = 0 with wgmma.sp: stream-K, of gemm/stream_k.h
    bool unrounded = false;  // with by_column: D is fp32, the sums themselves
};

void gemm_mma_sp(const GemmCall& call, const Queue& queue);

// (tile, splits) for a GPU.
std::pair<int, int> gemm_plan(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu);

// The same by wgmma.sp, on compute capability 9.0 alone: metadata "wgmma.sp", k not 0, tile and splits of gemm_wgmma_plan.
void gemm_wgmma_sp(const GemmCall& call, const Queue& queue);

// What keeps it from running on a device; empty where nothing does.
std::string wgmma_obstacle(int device);

std::pair<int, int> gemm_wgmma_plan(int64_t m, int64_t n, int64_t k, bool by_column, const Gpu& gpu);

struct WgmmaLaunch {
    int tiles, blocks, threads, shared;
};

// What a call would launch, for tests: the maps of values, dense and D, each (address, inner and outer size, inner and outer size of a
// box, swizzle code of a descriptor), and the bytes of the fourth parameter; the fifth are the tiles, or for stream-K a StreamK, whose bytes
// follow.
WgmmaLaunch gemm_wgmma_launch(const GemmCall& call, int processors, std::vector<int64_t>* maps, std::string* parameter);

// D = A B with 8-bit operands, scaled: D[i, j] = sum * row_steps[i] * col_steps[j] + bias[i], a sum of fp32, or int32 of int8, times the
// steps in this order. As gemm_wgmma_sp but: metadata "wgmma.sp.8bit", k a multiple of 128, B [n, k] in any case; `by_column`: D is
// stored [m, n], plain; dtype is that of D, kBFloat16 or kFloat32, and with the latter there are no bias, activation and residual.
struct ScaledCall {
    GemmCall gemm;  // tile and splits of gemm_wgmma_8bit_plan
    const float *row_steps, *col_steps;
    bool by_row, by_col;  // one for each, or one for all
    int a, b;             // dtype codes of eight_bit.h
    bool promotes;        // fp8 sums into fp32 every 128 products
};

void gemm_wgmma_sp_8bit(const ScaledCall& call, const Queue& queue);

// Whether there is a kernel for a pair of types and a way to store D.
bool gemm_wgmma_8bit_has(int a, int b, bool by_column);

std::pair<int, int> gemm_wgmma_8bit_plan(int64_t m, int64_t n, int64_t k, bool promotes, const Gpu& gpu);

// As gemm_wgmma_launch.
WgmmaLaunch gemm_wgmma_8bit_launch(const ScaledCall& call, int processors, std::vector<int64_t>* maps, std::string* parameter);

// metadata.cu: canonical 2:4 indices (rows, cols/8 bytes) in a tensor core's order; layout: a code of packing.h. rows are a
// multiple of 16, or of 64 for wgmma.sp, cols of 64, or of 128 for 8 bits.
void metadata(const uint8_t* indices, int64_t rows, int64_t cols, int layout, uint32_t* out, const Queue& queue);

}  // namespace nm::cuda
