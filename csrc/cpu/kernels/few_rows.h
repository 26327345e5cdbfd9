// Eight rows of an N:M matrix side by side, a lane each, against a few tokens.
//
// Values of eight rows are transposed, so that one register holds the k-th of each. All of these lie in the same group of
// inputs, which is one register: a permute by the rows' indices brings each row its own. So there is one permute and one
// multiply-add for eight weights and a token, whatever M/N is, and the transposition is shared by all tokens.
#pragma once

#include "simd/simd.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

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
    static Floats chosen(const float* x, Uints position) {
        if (M == 4) return _mm256_permutevar_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(x)), Register(position));
        const Floats low = _mm256_permutevar8x32_ps(load(x), Register(position));
        if (M == 8) return low;
        const Floats high = _mm256_permutevar8x32_ps(load(x + 8), Register(position));
        return _mm256_blendv_ps(low, high, float_of(position << 28));  // by the index's bit 3
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
        Floats all[Tokens] = {}, sum[Tokens] = {};
        Uints damage = {};
        for (int64_t b = 0; b < blocks; ++b) {
            if (b % kChain == kChain - 1) {
                for (int t = 0; t < Tokens; ++t) {
                    all[t] += sum[t];
                    sum[t] = Floats{};
                }
            }
            const uint8_t* at = indices + b * 4;
            const auto word = [&](int r) { return word_at<uint32_t>(at + r * bytes); };
            const Uints words = {word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7)};
            if (M == 8) damage |= words;
            for (int half = 0; half < kEntries / 8; ++half) {
                const T* from = values + b * kEntries + half * 8;
                const float* inputs = x + b * kInputs + half * (8 / N * M);
                Floats v[8];
                for (int r = 0; r < 8; ++r) {
                    v[r] = widened(from + r * kept);
                    __builtin_prefetch(reinterpret_cast<const char*>(from + r * kept) + ahead);
                }
                transpose(v);
                NM_UNROLL_8 for (int k = 0; k < 8; ++k) {
                    const Uints position = words >> (kBits * (half * 8 + k));
                    NM_UNROLL_8 for (int t = 0; t < Tokens; ++t) {
                        sum[t] = fused(v[k], chosen(inputs + t * cols + k / N * M, position), sum[t]);
                    }
                }
            }
        }
        for (int t = 0; t < Tokens; ++t) store(total[t], all[t] + sum[t]);
        return M != 8 || !any(common(damage, splat(0x88888888u)));
    }
};

}  // namespace
}  // namespace nm

#endif
