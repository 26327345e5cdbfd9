// 8-bit tensors for wgmma.sp: straight, transposed, or packed at 2:4 in the layout of 8-bit operands. Each element is multiplied by
// a scale in fp32 and rounded once; there is one scale per tensor or per row of the result.
#include <stdexcept>

#include "../core/dispatch.h"
#include "../core/eight_bit.h"
#include "kernels.h"
#include "launch.h"
#include "packing.h"

namespace nm::cuda {

namespace {

constexpr int kThreads = 256;

// Four elements, the first in the low byte.
template <class Out>
NM_DEVICE uint32_t rounded_four(const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    // the first operand becomes the upper number
#define NM_PAIR(type, pair, i) asm("cvt.rn.satfinite." type ".f32 %0, %1, %2;" : "=h"(pair) : "f"(x[i + 1]), "f"(x[i]))
    if constexpr (!std::is_same_v<Out, int8_t>) {
        uint16_t low, high;
        if constexpr (std::is_same_v<Out, e4m3>) {
            NM_PAIR("e4m3x2", low, 0);
            NM_PAIR("e4m3x2", high, 2);
        } else {
            NM_PAIR("e5m2x2", low, 0);
            NM_PAIR("e5m2x2", high, 2);
        }
        return uint32_t(low) | uint32_t(high) << 16;
    }
#undef NM_PAIR
#endif
    uint32_t word = 0;
    NM_UNROLL
    for (int i = 0; i < 4; ++i) word |= eight_bits(from_float<Out>(x[i])) << (8 * i);
    return word;
}

// Sixteen elements of T, in order.
template <class In, class Out>
NM_DEVICE void round_sixteen(const In* x, float scale, uint32_t (&to)[4]) {
    NM_UNROLL
    for (int i = 0; i < 4; ++i) {
        float four[4];
        NM_UNROLL
        for (int e = 0; e < 4; ++e) four[e] = to_float(x[4 * i + e]) * scale;
        to[i] = rounded_four<Out>(four);
    }
}

// A thread takes 16 elements of a row.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const In* x, const float* scale, int by_row, int64_t rows, int64_t cols, bool wide, uint8_t* out) {
    const int64_t pieces = (cols + 15) / 16, at = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = at / pieces, col = at % pieces * 16;
    if (row >= rows) return;
    In elements[16];
    uint32_t words[4];
    load_some<16>(x + row * cols + col, elements, cols - col, wide);
    round_sixteen<In, Out>(elements, scale[row * by_row], words);
    store_some<16>(out + row * cols + col, reinterpret_cast<const uint8_t*>(words), cols - col, wide);
}

// A block processes 64 columns, which are rows of the result. A thread reads 16 bytes of each of four rows, and stores words of
// four elements of a column to shared memory.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads) quantize_columns_kernel(const In* x, const float* scale, int by_row, int64_t rows, int64_t cols, bool wide_in,
                                                                    bool wide_out, uint8_t* out) {
    constexpr int kWide = 16 / int(sizeof(In)), kCols = 64, kAcross = kCols / kWide, kDown = kThreads / kAcross, kRows = 4 * kDown;
    using Lines = uint32_t[kCols][kDown + 1];  // the next line is in the next bank
    NM_SHARED(Lines, lines);
    const int64_t tiles = (cols + kCols - 1) / kCols, row_0 = blockIdx.x / tiles * kRows, col_0 = blockIdx.x % tiles * kCols;
    const int across = int(threadIdx.x) % kAcross, down = int(threadIdx.x) / kAcross;
    const int64_t row = row_0 + 4 * down, col = col_0 + across * kWide;
    In elements[4][kWide] = {};
    NM_UNROLL
    for (int r = 0; r < 4; ++r) {
        if (row + r < rows) load_some<kWide>(x + (row + r) * cols + col, elements[r], cols - col, wide_in);
    }
    NM_UNROLL
    for (int c = 0; c < kWide; ++c) {
        const float factor = col + c < cols ? scale[(col + c) * by_row] : 0.0f;
        const float four[4] = {to_float(elements[0][c]) * factor, to_float(elements[1][c]) * factor, to_float(elements[2][c]) * factor,
                               to_float(elements[3][c]) * factor};
        lines[across * kWide + c][down] = rounded_four<Out>(four);
    }
    __syncthreads();
    NM_UNROLL
    for (int turn = 0; turn < kCols * kDown / 4 / kThreads; ++turn) {
        const int piece = turn * kThreads + int(threadIdx.x), line = piece / (kDown / 4), within = piece % (kDown / 4) * 4;
        const int64_t first = row_0 + 4 * within;
        if (col_0 + line >= cols || first >= rows) continue;
        uint32_t words[4];
        NM_UNROLL
        for (int i = 0; i < 4; ++i) words[i] = lines[line][within + i];
        store_some<16>(out + (col_0 + line) * rows + first, reinterpret_cast<const uint8_t*>(words), rows - first, wide_out);
    }
}

// The largest two of each four, in tiles of 16 rows and 128 columns. A thread has rows g and g + 8 of a tile, and of each 64
// columns 32 p to 32 p + 31: the operands of lanes 4 g + 2 p and 4 g + 2 p + 1 for two instructions.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    quantize_pack_kernel(const In* w, const float* scale, int by_row, int64_t rows, int64_t cols, uint8_t* values, uint32_t* metadata) {
    const int64_t across = cols / 128, at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 16;
    const int lane = int(threadIdx.x) % 16, g = lane / 2, p = lane % 2;
    const int64_t tile = at / across, j = at % across;
    if (tile >= rows / 16) return;
    uint32_t words[4];
    NM_UNROLL
    for (int i = 0; i < 4; ++i) {
        const int64_t row = tile * 16 + i / 2 * 8 + g, col = j * 128 + i % 2 * 64 + p * 32;
        const float factor = scale[row * by_row];
        constexpr int kWords = 4 * int(sizeof(In));  // of a quad
        uint32_t elements[2 * kWords], packed[4];
        load_wide<2 * kWords>(reinterpret_cast<const uint32_t*>(w + row * cols + col), elements);
        words[i] = 0;
        NM_UNROLL
        for (int quad = 0; quad < 2; ++quad) {
            const uint32_t* const own = elements + quad * kWords;
            const LargestTwo<In> largest(own);
            uint32_t kept[2 * sizeof(In)];
            pick_two<In>(own, largest.mask, kept);
            NM_UNROLL
            for (int half = 0; half < 2; ++half) {
                float four[4];
                NM_UNROLL
                for (int e = 0; e < 4; ++e) four[e] = to_float(of_bits<In>(element<In>(kept, 4 * half + e))) * factor;
                packed[2 * quad + half] = rounded_four<Out>(four);
            }
            words[i] |= joined_nibbles(index_bytes_of(largest.mask)) << (16 * quad);
        }
        store_global<4>(reinterpret_cast<uint32_t*>(values + (row * cols + col) / 2), packed);
    }
    NM_UNROLL
    for (int step = 0; step < 2; ++step) {
        const uint32_t rows_of[2] = {words[step], words[2 + step]};
        store_global<2>(metadata + (tile / 4 * across + j) * 256 + step * 128 + tile % 4 * 32 + g * 4 + p * 2, rows_of);
    }
}

// f(In{}, Out{}).
template <class F>
void by_dtypes(int in, int out, const F& f) {
    by_dtype(in, [&](auto element) {
        switch (out) {
            case kE4m3: return f(element, e4m3{});
            case kE5m2: return f(element, e5m2{});
            case kInt8: return f(element, int8_t{});
            default: throw std::invalid_argument("quantize: dtype code " + std::to_string(out) + " is not one of 8 bits");
        }
    });
}

}  // namespace

void quantize(const Quantize& call, const Queue& queue) {
    by_dtypes(call.dtype, call.out_dtype, [&](auto in, auto out) {
        using In = decltype(in);
        using Out = decltype(out);
        const auto* const x = static_cast<const In*>(call.x);
        auto* const to = static_cast<uint8_t*>(call.values);
        const bool wide_in = multiples_of_16(x, call.cols * int64_t(sizeof(In)));
        if (call.transposed) {
            constexpr int rows = 4 * kThreads / (64 * int(sizeof(In)) / 16);
            launch("quantize_columns_kernel", quantize_columns_kernel<In, Out>, {cdiv(call.rows, rows) * cdiv(call.cols, 64), kThreads}, queue, x,
                   call.scale, int(call.by_row), call.rows, call.cols, wide_in, multiples_of_16(to, call.rows), to);
        } else {
            launch("quantize_kernel", quantize_kernel<In, Out>, {cdiv(call.rows * cdiv(call.cols, 16), kThreads), kThreads}, queue, x, call.scale,
                   int(call.by_row), call.rows, call.cols, wide_in && multiples_of_16(to, call.cols), to);
        }
    });
}

void quantize_pack(const Quantize& call, uint32_t* metadata, const Queue& queue) {
    if (call.rows % 64 || call.cols % 128) throw std::invalid_argument("quantize_pack: sizes are not whole tiles");
    by_dtypes(call.dtype, call.out_dtype, [&](auto in, auto out) {
        using In = decltype(in);
        launch("quantize_pack_kernel", quantize_pack_kernel<In, decltype(out)>, {cdiv(call.rows * (call.cols / 128), kThreads), kThreads}, queue,
               static_cast<const In*>(call.x), call.scale, int(call.by_row), call.rows, call.cols, static_cast<uint8_t*>(call.values), metadata);
    });
}

}  // namespace nm::cuda
