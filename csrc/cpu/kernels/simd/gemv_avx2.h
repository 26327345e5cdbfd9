// The blocks of gemv_avx512.h for AVX2: two halves of 8 stored values, whose inputs lie in M/N registers of 8.
//
// Groups of up to 8 lie in one register each, known to the compiler: one permute per register. Larger groups spread over
// several, and are gathered.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include "gemv_packed.h"

namespace nm {
namespace {

inline __m256 load8(const float* v) { return _mm256_loadu_ps(v); }
inline __m256 load8(const bf16* v) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(v));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline __m256 load8(const fp16* v) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(v))); }

template <int N, int M>
struct Block : Packed<N, M> {
    struct Sum {
        __m256 half[2];
        friend Sum operator+(const Sum& a, const Sum& b) {
            return {{_mm256_add_ps(a.half[0], b.half[0]), _mm256_add_ps(a.half[1], b.half[1])}};
        }
    };
    using Values = Sum;
    struct Places {
        __m256i half[2];
    };

    template <class T>
    static Values values(const T* v) {
        return {{load8(v), load8(v + 8)}};
    }

    // Groups of up to 8: where in its register the input of each lane is, 3 bits, what is above them does not matter.
    // Larger ones: which input of the half's it is.
    static Places places(const uint8_t* indices) { return {{half_places(indices, 0), half_places(indices, 1)}}; }

    static Sum multiply_add(const Values& v, const Places& places, const float* x, Sum sum) {
        for (int h = 0; h < 2; ++h) {
            sum.half[h] = _mm256_fmadd_ps(v.half[h], chosen(places.half[h], x + h * kHalfInputs), sum.half[h]);
        }
        return sum;
    }

    static float total(const Sum& sum) {
        const __m256 eight = _mm256_add_ps(sum.half[0], sum.half[1]);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }

  private:
    static constexpr int kHalfInputs = Packed<N, M>::kInputs / 2;
    static constexpr int kRegisters = M / N;
    static constexpr int kLanes = 8 / kRegisters;  // of one register

    static __m256i half_places(const uint8_t* indices, int half) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i shifted;
        if (M > 16) {
            shifted = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(indices + 8 * half)));
        } else if (M > 4) {
            shifted = _mm256_srlv_epi32(_mm256_set1_epi32(int(load_word<uint32_t>(indices + 4 * half))), _mm256_slli_epi32(lane, 2));
        } else {
            const __m256i shift = _mm256_add_epi32(_mm256_slli_epi32(lane, 1), _mm256_set1_epi32(16 * half));
            shifted = _mm256_srlv_epi32(_mm256_set1_epi32(int(load_word<uint32_t>(indices))), shift);
        }
        if (M == 8) return shifted;
        const __m256i group = _mm256_setr_epi32(0 / N * M, 1 / N * M, 2 / N * M, 3 / N * M, 4 / N * M, 5 / N * M, 6 / N * M, 7 / N * M);
        return _mm256_or_si256(_mm256_and_si256(shifted, _mm256_set1_epi32(M - 1)), group);
    }

    // Register r holds the inputs of lanes r * kLanes and on.
    static constexpr int from_register(int r) { return ((1 << kLanes) - 1) << (r * kLanes); }

    static __m256 chosen(__m256i places, const float* x) {
        if constexpr (M > 8) return _mm256_i32gather_ps(x, places, 4);
        __m256 inputs = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x), places);
        if constexpr (kRegisters > 1) inputs = _mm256_blend_ps(inputs, moved<1>(places, x), from_register(1));
        if constexpr (kRegisters > 2) {
            inputs = _mm256_blend_ps(inputs, moved<2>(places, x), from_register(2));
            inputs = _mm256_blend_ps(inputs, moved<3>(places, x), from_register(3));
        }
        if constexpr (kRegisters > 4) {
            inputs = _mm256_blend_ps(inputs, moved<4>(places, x), from_register(4));
            inputs = _mm256_blend_ps(inputs, moved<5>(places, x), from_register(5));
            inputs = _mm256_blend_ps(inputs, moved<6>(places, x), from_register(6));
            inputs = _mm256_blend_ps(inputs, moved<7>(places, x), from_register(7));
        }
        return inputs;
    }

    template <int R>
    static __m256 moved(__m256i places, const float* x) {
        return _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + 8 * R), places);
    }
};

}  // namespace
}  // namespace nm

#endif
