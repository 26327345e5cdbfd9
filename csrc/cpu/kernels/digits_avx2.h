// Rows of stored integers times digits of x at 2:4, with AVX2 alone: byte shuffles pick the digits, which take the integers' signs, and
// pairs of products of the integers' magnitudes are added in 16 bits. A digit is at most 127, so that they fit and a sign can turn: x
// is 254 times the upper digit and the lower one.
#pragma once

#include "digits.h"

#if defined(__AVX2__) && !(defined(__AVX512VBMI2__) && defined(__AVX512VNNI__))

namespace nm {
namespace {

constexpr int64_t kPairColumns = 128, kPairValues = 64, kPairBytes = 16;  // of a block: columns, stored values, bytes of indices

inline __m256i thirty_two(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m128i sixteen(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
inline __m256i both(__m128i low, __m128i high) { return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1); }

// Of each 128 columns first 0 to 15 and 64 to 79, then 16 to 31 and 80 to 95, and so on: what a shuffle picks from.
inline void make_pairs(const IntegersLinearCall& call, int64_t token, int64_t tokens, Digits& digits, int threads) {
    constexpr float kBase = 254.0f, kMost = 127 * 254 + 127, kRound = 12582912.0f;  // added, numbers are rounded: its ulp is 1
    const int64_t width = digits.width;
    each_token(call, token, tokens, kMost, digits, threads, [&](int64_t t, const float* x, float inverse) {
        uint8_t *upper = digits.planes + t * 2 * width, *lower = upper + width;
        for (int64_t i = 0; i < width; i += 16) {
            const int64_t to = i / kPairColumns * kPairColumns + i % 64 / 16 * 32 + i % kPairColumns / 64 * 16;
            for (int64_t l = 0; l < 16; ++l) {
                const float whole = (x[i + l] * inverse + kRound) - kRound, high = (whole * (1 / kBase) + kRound) - kRound;
                upper[to + l] = uint8_t(int(high));
                lower[to + l] = uint8_t(int(whole - high * kBase));
            }
        }
    });
}

// Whether a step is for whole blocks, and sums fit 32 bits.
inline bool fits_pairs(const Integers& w) { return w.kept <= 1 << 19 && (w.steps == 1 || w.kept / w.steps % kPairValues == 0); }

// 16 stored values as bytes.
template <int Bits>
NM_INLINE __m128i stored16(const uint8_t* row, int64_t k) {
    if constexpr (Bits == 8) return sixteen(row + k);
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + k / 2)));
    const __m128i halves = _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), _mm_set1_epi8(15));
    return _mm_shuffle_epi8(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1), halves);
}

// A block's values and where their digits lie, in the order of a block of digits: two halves, each with what it takes from the first and
// from the second register of them.
struct PairBlock {
    __m256i magnitude[2], values[2], first[2], second[2];

    template <int Bits>
    NM_INLINE void open(const uint8_t* row, int64_t k, const uint8_t* packed) {
        const __m256i low = _mm256_set1_epi8(15), three = _mm256_set1_epi8(3);
        const __m256i base = _mm256_setr_epi8(0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12);
        // 0x80 picks zero
        const __m256i not_first = _mm256_set_epi64x(INT64_C(-0x7f7f7f7f7f7f7f80), 0, INT64_C(-0x7f7f7f7f7f7f7f80), 0);
        const __m256i not_second = _mm256_set_epi64x(0, INT64_C(-0x7f7f7f7f7f7f7f80), 0, INT64_C(-0x7f7f7f7f7f7f7f80));
        // each lane: the halves of eight bytes, which are pairs of indices, in order
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_castsi128_si256(sixteen(packed)), 0x50);
        const __m256i pairs = _mm256_unpacklo_epi8(_mm256_and_si256(bytes, low), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
        const __m256i one = _mm256_and_si256(pairs, three), other = _mm256_and_si256(_mm256_srli_epi16(pairs, 2), three);
        const __m256i places[2] = {_mm256_or_si256(_mm256_unpacklo_epi8(one, other), base), _mm256_or_si256(_mm256_unpackhi_epi8(one, other), base)};
        for (int i = 0; i < 2; ++i) {
            first[i] = _mm256_or_si256(places[i], not_first);
            second[i] = _mm256_or_si256(places[i], not_second);
            values[i] = both(stored16<Bits>(row, k + i * 16), stored16<Bits>(row, k + 32 + i * 16));
            magnitude[i] = _mm256_abs_epi8(values[i]);
        }
    }

    // The sums of four products each.
    NM_INLINE __m256i times(const uint8_t* digits) const {
        __m256i sums[2];
        for (int i = 0; i < 2; ++i) {
            const __m256i x0 = thirty_two(digits + i * 64), x1 = thirty_two(digits + i * 64 + 32);
            const __m256i x = _mm256_or_si256(_mm256_shuffle_epi8(x0, first[i]), _mm256_shuffle_epi8(x1, second[i]));
            sums[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude[i], _mm256_sign_epi8(x, values[i])), _mm256_set1_epi16(1));
        }
        return _mm256_add_epi32(sums[0], sums[1]);
    }
};

template <int Bits, int Tokens>
void pairs_of_rows(const Integers& w, const uint8_t* indices, const Digits& x, int64_t token, int64_t row, int64_t end, float* sums,
                   int64_t stride) {
    const int64_t index_row = index_bytes(w.kept, 2), whole = w.kept / kPairValues, blocks = (w.kept + kPairValues - 1) / kPairValues;
    const int64_t each = w.steps == 1 ? blocks : w.kept / w.steps / kPairValues;
    for (int64_t r = 0; row + r < end; ++r) {
        const uint8_t *values = stored_row(w, row + r), *packed = indices + (row + r) * index_row;
        __m256 total[Tokens];
        for (int t = 0; t < Tokens; ++t) total[t] = _mm256_setzero_ps();
        for (int64_t b = 0, segment = 0; b < blocks; ++segment) {
            __m256i upper[Tokens], lower[Tokens];
            for (int t = 0; t < Tokens; ++t) upper[t] = lower[t] = _mm256_setzero_si256();
            for (const int64_t stop = std::min(b + each, blocks); b < stop; ++b) {
                PairBlock block;
                if (__builtin_expect(b < whole, true)) {
                    _mm_prefetch(reinterpret_cast<const char*>(values + b * 8 * Bits + 4096), _MM_HINT_T0);
                    if (b % 4 == 0) _mm_prefetch(reinterpret_cast<const char*>(packed + b * kPairBytes + 1024), _MM_HINT_T0);
                    block.open<Bits>(values, b * kPairValues, packed + b * kPairBytes);
                } else {
                    uint8_t last[kPairValues] = {}, last_packed[kPairBytes] = {};
                    std::memcpy(last, values + b * 8 * Bits, size_t(stored_bytes(w) - b * 8 * Bits));
                    std::memcpy(last_packed, packed + b * kPairBytes, size_t(index_row - b * kPairBytes));
                    block.open<Bits>(last, 0, last_packed);
                }
                for (int t = 0; t < Tokens; ++t) {
                    const uint8_t* digits = x.upper(token + t) + b * kPairColumns;
                    upper[t] = _mm256_add_epi32(upper[t], block.times(digits));
                    lower[t] = _mm256_add_epi32(lower[t], block.times(digits + x.width));
                }
            }
            const __m256 step = _mm256_set1_ps(to_float(w.step[(row + r) * w.steps + segment]));
            for (int t = 0; t < Tokens; ++t) {
                const __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(upper[t]), _mm256_set1_ps(254.0f), _mm256_cvtepi32_ps(lower[t]));
                total[t] = _mm256_fmadd_ps(sum, step, total[t]);
            }
        }
        for (int t = 0; t < Tokens; ++t) {
            const __m128 four = _mm_add_ps(_mm256_castps256_ps128(total[t]), _mm256_extractf128_ps(total[t], 1));
            const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            sums[t * stride + r] = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two))) * x.scale[token + t];
        }
    }
}

// The sums of rows [row, end) for `tokens` tokens, to sums[t * stride + r].
inline void pairs_of_rows(const Integers& w, const uint8_t* indices, const Digits& x, int64_t tokens, int64_t row, int64_t end, float* sums,
                          int64_t stride) {
    const auto with = [&](auto bits) {
        int64_t t = 0;
        for (; t + 2 <= tokens; t += 2) pairs_of_rows<bits, 2>(w, indices, x, t, row, end, sums + t * stride, stride);
        if (t < tokens) pairs_of_rows<bits, 1>(w, indices, x, t, row, end, sums + t * stride, stride);
    };
    if (w.bits == 8) with(std::integral_constant<int, 8>());
    else with(std::integral_constant<int, 4>());
}

}  // namespace
}  // namespace nm

#endif
