// GEMMs on sparse tensor cores: D = A B with A 2:4 along k, in 16 bits, summed in fp32.
//
//   gemm.h       what a GEMM is, and which block computes which part of it
//   tile.h       how a block cuts its part into stages, warps and instructions, and where bytes lie in shared memory
//   plan.h       host: which tile, and how many parts k is cut into
//   stages.h     global memory to shared memory, by cp.async
//   fragments.h  shared memory to registers, by ldmatrix
//   epilogue.h   sums to results: bias, activation, residual, the rounding, 16-byte stores
//   mma_sp.cu    the kernel for mma.sp, from sm_80 on, and the host's functions
//
// and for wgmma.sp, on sm_90a alone:
//
//   wgmma_tile.h      how a block cuts its part, descriptors and tensor maps
//   wgmma_plan.h      host: which tile there, by what binds on Hopper
//   wgmma_epilogue.h  sums to results: by stmatrix and copies of boxes, or through epilogue.h
//   wgmma_kernel.h    the kernel, and how it is launched
//   stream_k.h        how stream-K divides tiles that do not fill a last wave
//   tensor_map.*      host: maps of matrices, made by the driver
//   wgmma_sp.cu       its 16-bit kinds, and the host's functions
//   wgmma_sp_8bit.cu  its 8-bit kinds: e4m3, e5m2, int8
//
// A is the compressed operand: values (m, k/2), row-major, and metadata in one of the layouts of reference/layouts.py. B is dense,
// and stored in one of two ways:
//
//   by depth     x [n, k]: fprop, where n counts tokens; so is the gradient of the input, from the packed transpose
//   by column    x [k, n]: wgrad, where k counts tokens; m and n are the weight's sizes
//
// D is stored [n, m] in the first case, as y [tokens, out] is, and [m, n] in the second.
#pragma once

#include <type_traits>

#include "../linear.h"

namespace nm::cuda::gemm {

// A block's part of a GEMM: the tile of D, and the range of slabs of k.
struct Origin {
    int64_t row, col;
    int first, last;
    int part;
};

template <class T>
struct Gemm {
    const T* values;
    const uint32_t* metadata;
    const T* dense;
    Sums<T> sums;  // `rows` of it is the length of a stored row of D, `tokens` their number
    int64_t m, n, k;
    int row_tiles, col_tiles;
    int part;   // slabs of a part
    int warps;  // with contiguous metadata: 1 for mma.sp, 4 for wgmma.sp

    // Concurrent blocks should share operands in L2: they go down the rows of kBand tiles of columns.
    NM_DEVICE Origin origin(unsigned index, int rows, int cols, int depth) const {
        constexpr int kBand = 8;
        const unsigned down = unsigned(row_tiles), blocks = down * unsigned(col_tiles), block = index % blocks;
        const int part_of = int(index / blocks), band = int(block / (kBand * down)), left = col_tiles - band * kBand;
        const unsigned in_band = block % (kBand * down), wide = unsigned(left < kBand ? left : kBand);
        const int slabs = int(k / depth), first = part_of * part, last = slabs - first < part ? slabs : first + part;
        return {int64_t(in_band / wide) * rows, (int64_t(band) * kBand + in_band % wide) * cols, first, last, part_of};
    }
};

// A GEMM with 8-bit operands: a sum is multiplied by the steps of its row and column of D. For per-tensor steps the strides are 0.
// Results are bf16.
struct ScaledGemm : Gemm<bf16> {
    const float *row_steps, *col_steps;
    int row_stride, col_stride;
};

// The variants of the wgmma.sp kernel: T is bf16 or fp16, the type of operands and results, or EightBits. With kPromotes sums are
// added to others every 128 products, because Hopper's tensor cores add fp8 with about 14 bits (DeepSeek-V3, arXiv 2412.19437,
// 3.3.2).
template <class A, class B, bool kPromotes>
struct EightBits {};

template <class T>
struct Kind {
    using Out = T;
    using Sum = float;
    using Told = Gemm<T>;
    static constexpr int kBytes = 2;
    static constexpr bool kPromotes = false;
};

template <class OfA, class OfB, bool kPromoted>
struct Kind<EightBits<OfA, OfB, kPromoted>> {
    using A = OfA;
    using B = OfB;
    using Out = bf16;
    using Sum = std::conditional_t<std::is_same_v<A, int8_t>, int32_t, float>;
    using Told = ScaledGemm;
    static constexpr int kBytes = 1;
    static constexpr bool kPromotes = kPromoted;
};

}  // namespace nm::cuda::gemm
