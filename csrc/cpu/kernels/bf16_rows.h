// C = A B for a few tokens with vdpbf16ps: a row of A is expanded in registers and multiplied with every token, so that the
// stored form is read once and nothing is written but the results.
#pragma once

#include <atomic>

#include "bf16.h"

namespace nm {
namespace {

#if defined(__AVX512BF16__)

#if defined(__AMX_BF16__)
constexpr int64_t kRowTokens = 1;  // tile registers do 16 of them in little more time
#else
constexpr int64_t kRowTokens = 8;  // a block of sums has lanes for 16
#endif

// The hardware follows one stream from the cache or memory well, but stops at each page of 4 KB.
constexpr int64_t kPrefetchBytes = 4096;

// One row, T tokens; x holds them in rows of `stride` numbers, a multiple of kLine. False: an index is not below m.
template <int T, class P>
bool row_product(const Bf16Gemm& gemm, P p, const bf16* x, int64_t stride, int64_t row) {
    constexpr int kChains = T <= 2 ? 4 : 2;  // alternating sums of a token: a single one would wait for the adder
    constexpr int64_t kValueBytes = kPiece / P::m * P::n * int64_t(sizeof(bf16));
    const StoredBf16& a = gemm.a;
    const char* values = reinterpret_cast<const char*>(a.values + row * a.kept) + kPrefetchBytes;
    const char* indices = reinterpret_cast<const char*>(a.indices + row * a.bytes) + kPrefetchBytes * index_bits(P::m) / 16;
    __m512 sums[T][kChains];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) sums[t][chain] = _mm512_setzero_ps();
    }
    bool valid = true;
    for (int64_t begin = 0; begin < a.cols; begin += kPiece) {
        for (int64_t byte = 0; byte < kValueBytes; byte += 64) __builtin_prefetch(values + byte);
        __builtin_prefetch(indices);
        values += kValueBytes;
        indices += kValueBytes * index_bits(P::m) / 16;
        const int64_t end = std::min(begin + kPiece, a.cols);
        valid &= expand_lines(a, p, row, begin, end, [&](auto i, int64_t line, __m512i w) __attribute__((always_inline)) {
            const bf16* inputs = x + begin + line * kLine;
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                __m512& sum = sums[t][i % kChains];
                sum = _mm512_dpbf16_ps(sum, __m512bh(w), __m512bh(load_line(inputs + t * stride)));
            }
        });
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
        __m512 sum = _mm512_add_ps(sums[t][0], sums[t][1]);
        if constexpr (kChains == 4) sum = _mm512_add_ps(sum, _mm512_add_ps(sums[t][2], sums[t][3]));
        if (t >= gemm.tokens) break;
        const float y = _mm512_reduce_add_ps(sum) + (gemm.bias ? to_float(gemm.bias[row]) : 0.0f);
        const int64_t at = row * gemm.c_row + t * gemm.c_col;
        if (gemm.unrounded) static_cast<float*>(gemm.c)[at] = y;
        else static_cast<bf16*>(gemm.c)[at] = from_float<bf16>(y);
    }
    return valid;
}

template <int T, class P>
bool row_products(const Bf16Gemm& gemm, P p, int threads) {
    static thread_local Scratch room;
    const int64_t stride = round_up(gemm.depth, kLine);
    bf16* x = room.at_least<bf16>(T * stride);
    std::memset(static_cast<void*>(x), 0, size_t(T * stride) * sizeof(bf16));
    for (int64_t t = 0; t < gemm.tokens; ++t) {
        const bf16* from = gemm.b + t * gemm.b_col;
        for (int64_t k = 0; k < gemm.depth; ++k) x[t * stride + k] = from[k * gemm.b_row];
    }
    const int64_t least = 8 * kChunk / (gemm.depth + 1) + 1, step = std::max(least, ceil_div(gemm.outputs, 4 * threads));
    std::atomic<bool> valid{true};
    parallel_for(ceil_div(gemm.outputs, step), threads, [&](int64_t range) {
        bool good = true;
        for (int64_t row = range * step; row < std::min((range + 1) * step, gemm.outputs); ++row) good &= row_product<T>(gemm, p, x, stride, row);
        if (!good) valid = false;
    });
    return valid;
}

template <class P>
bool few_row_products(const Bf16Gemm& gemm, P p, int threads) {
    if (gemm.tokens == 1) return row_products<1>(gemm, p, threads);
    if constexpr (kRowTokens > 1) {
        if (gemm.tokens == 2) return row_products<2>(gemm, p, threads);
        if (gemm.tokens <= 4) return row_products<4>(gemm, p, threads);
        return row_products<8>(gemm, p, threads);
    }
    return false;  // not called with so many
}

#endif

}  // namespace
}  // namespace nm
