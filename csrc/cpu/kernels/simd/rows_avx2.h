// Eight rows of an N:M matrix side by side, a lane each, against a few tokens.
//
// Values of eight rows are transposed, so that one register holds the k-th of each. All of these lie in the same group of
// inputs, which is one register: a permute by the rows' indices brings each row its own. So there is one permute and one
// multiply-add for eight weights and a token, whatever M/N is, and the transposition is shared by all tokens.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include "gemv_avx2.h"
#include "spmm_transpose.h"

namespace nm {
namespace {

template <int N, int M>
struct EightRows {
    static_assert(8 % N == 0 && (M == 4 || M == 8 || M == 16), "eight stored values are whole groups");
    static constexpr int kRows = 8;
    static constexpr int kBits = M == 4 ? 2 : 4;
    static constexpr int kEntries = 32 / kBits;  // of a row, whose indices fill a word
    static constexpr int kInputs = kEntries / N * M;

    // The input of each row among the M of a group.
    static __m256 chosen(const float* x, __m256i position) {
        if (M == 4) return _mm256_permutevar_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(x)), position);
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x), position);
        if (M == 8) return low;
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + 8), position);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(position, 28)));  // by the index's bit 3
    }

    // total[t][r] = the first `blocks` * kEntries stored values of row r times their inputs of token t. False: an index is not
    // below m. Rows are `kept` values and `bytes` of indices apart, tokens `cols` inputs.
    template <int Tokens, class T>
    static bool sums(const T* values, int64_t kept, const uint8_t* indices, int64_t bytes, const float* x, int64_t cols, int64_t blocks,
                     float (&total)[Tokens][kRows]) {
        // eight rows are eight streams: a little ahead in each, or if rows are short the same of the next eight
        const int64_t row = kept * int64_t(sizeof(T)), ahead = row > 2048 ? 512 : 8 * row;
        // sums of sums, so that rounding errors do not grow with the length of the row
        constexpr int kChain = 128 / kEntries;
        __m256 all[Tokens], sum[Tokens];
        for (__m256& s : all) s = _mm256_setzero_ps();
        for (__m256& s : sum) s = _mm256_setzero_ps();
        __m256i damage = _mm256_setzero_si256();
        for (int64_t b = 0; b < blocks; ++b) {
            if (b % kChain == kChain - 1) {
                for (int t = 0; t < Tokens; ++t) {
                    all[t] = _mm256_add_ps(all[t], sum[t]);
                    sum[t] = _mm256_setzero_ps();
                }
            }
            const uint8_t* at = indices + b * 4;
            __m256i words = _mm256_setr_epi32(
                word<0>(at, bytes), word<1>(at, bytes), word<2>(at, bytes), word<3>(at, bytes), word<4>(at, bytes), word<5>(at, bytes),
                word<6>(at, bytes), word<7>(at, bytes));
            if (M == 8) damage = _mm256_or_si256(damage, words);
            for (int half = 0; half < kEntries / 8; ++half) {
                const T* from = values + b * kEntries + half * 8;
                const float* inputs = x + b * kInputs + half * (8 / N * M);
                __m256 v[8];
                for (int r = 0; r < 8; ++r) {
                    v[r] = load8(from + r * kept);
                    __builtin_prefetch(reinterpret_cast<const char*>(from + r * kept) + ahead);
                }
                transpose8(v);
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) {
                    const __m256i position = _mm256_srli_epi32(words, kBits * (half * 8 + k));
#pragma GCC unroll 8
                    for (int t = 0; t < Tokens; ++t) {
                        sum[t] = _mm256_fmadd_ps(v[k], chosen(inputs + t * cols + k / N * M, position), sum[t]);
                    }
                }
            }
        }
        for (int t = 0; t < Tokens; ++t) _mm256_storeu_ps(total[t], _mm256_add_ps(all[t], sum[t]));
        return M != 8 || _mm256_testz_si256(damage, _mm256_set1_epi32(int(0x88888888u)));
    }

  private:
    template <int Row>
    static int word(const uint8_t* indices, int64_t bytes) {
        return int(load_word<uint32_t>(indices + Row * bytes));
    }
};

}  // namespace
}  // namespace nm

#endif
