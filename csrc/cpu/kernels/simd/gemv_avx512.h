// 16 stored values of an N:M row against the 16 M/N inputs that they choose from, which lie in M/N registers.
//
// Lane l holds stored value l of the block. Its group starts at input (l / N) M, so the pair of registers that holds
// its input is known to the compiler, and one two-register permute per pair brings the inputs of all its lanes. Nothing
// is gathered: a gather of 16 floats takes 20 cycles on Zen 5, the 8 permutes of 1:16 about 10 (AMD EPYC, 2026-11-21).
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include "gemv_packed.h"

namespace nm {
namespace {

inline __m512 load16(const float* v) { return _mm512_loadu_ps(v); }
inline __m512 load16(const bf16* v) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline __m512 load16(const fp16* v) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v))); }

template <int N, int M>
struct Block : Packed<N, M> {
    using Sum = __m512;
    using Values = __m512;
    using Places = __m512i;
    static constexpr int kPairs = M / N / 2;

    template <class T>
    static Values values(const T* v) {
        return load16(v);
    }

    // Where the input of each lane is in its pair of registers: 5 bits, what is above them does not matter.
    static Places places(const uint8_t* indices) {
        if (M == 32) return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(indices)));
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i group = _mm512_setr_epi32(0 / N * M, 1 / N * M, 2 / N * M, 3 / N * M, 4 / N * M, 5 / N * M, 6 / N * M, 7 / N * M,
                                                8 / N * M, 9 / N * M, 10 / N * M, 11 / N * M, 12 / N * M, 13 / N * M, 14 / N * M, 15 / N * M);
        __m512i shifted;
        if (M <= 4) {
            shifted = _mm512_srlv_epi32(_mm512_set1_epi32(int(load_word<uint32_t>(indices))), _mm512_slli_epi32(lane, 1));
        } else {
            const __m512i all = _mm512_set1_epi64(int64_t(load_word<uint64_t>(indices)));
#if defined(__AVX512VBMI__)
            shifted = _mm512_multishift_epi64_epi8(_mm512_slli_epi32(lane, 2), all);
#else
            const __m512i byte = _mm512_srli_epi32(lane, 1);  // of each lane, brought to its low end
            shifted = _mm512_srlv_epi32(_mm512_shuffle_epi8(all, byte), _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(1)), 2));
#endif
        }
        return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi32(M - 1), group, 0xea);  // (shifted & (M - 1)) | group
    }

    static Sum multiply_add(Values v, Places places, const float* x, Sum sum) {
        __m512 inputs = _mm512_permutex2var_ps(_mm512_loadu_ps(x), places, _mm512_loadu_ps(x + 16));
        for (int pair = 1; pair < kPairs; ++pair) {
            const __m512 more = _mm512_permutex2var_ps(_mm512_loadu_ps(x + 32 * pair), places, _mm512_loadu_ps(x + 32 * pair + 16));
            inputs = _mm512_mask_mov_ps(inputs, from_pair(pair), more);
        }
        return _mm512_fmadd_ps(v, inputs, sum);
    }

    static float total(Sum sum) { return _mm512_reduce_add_ps(sum); }

  private:
    static constexpr int kLanes = 32 / M * N;  // of one pair
    static constexpr __mmask16 from_pair(int pair) { return __mmask16(((1u << kLanes) - 1) << (pair * kLanes)); }
};

}  // namespace
}  // namespace nm

#endif
