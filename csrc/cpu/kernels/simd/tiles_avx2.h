// Eight 4x4 tiles side by side, one per lane, with AVX2.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>

#include "../../../core/types.h"

namespace nm {
namespace {

struct Tiles {
    static constexpr int kCount = 8;
    using Scores = __m256;
    using Masks = __m256i;

    // One row: the magnitudes in the four columns of every tile; NaN counts as infinity. Four tiles in each half of the
    // registers are transposed as 4x4 matrices.
    template <class T>
    static void columns(const T* w, Scores* column) {
        __m256 v[4];
        for (int i = 0; i < 4; ++i) {
            const __m256i both = _mm256_set_m128i(wide(w + 16 + 4 * i), wide(w + 4 * i));
            const __m256i magnitude = _mm256_and_si256(both, _mm256_set1_epi32(0x7fffffff));
            v[i] = _mm256_castsi256_ps(_mm256_min_epi32(magnitude, _mm256_set1_epi32(0x7f800000)));
        }
        const __m256 a = _mm256_unpacklo_ps(v[0], v[1]), b = _mm256_unpackhi_ps(v[0], v[1]);
        const __m256 c = _mm256_unpacklo_ps(v[2], v[3]), d = _mm256_unpackhi_ps(v[2], v[3]);
        column[0] = _mm256_shuffle_ps(a, c, 0x44);
        column[1] = _mm256_shuffle_ps(a, c, 0xee);
        column[2] = _mm256_shuffle_ps(b, d, 0x44);
        column[3] = _mm256_shuffle_ps(b, d, 0xee);
    }

    static Scores plus(Scores a, Scores b) { return _mm256_add_ps(a, b); }
    static Scores none() { return _mm256_set1_ps(-1.0f); }

    // Where the score is better than the best so far, the mask is found.
    static void keep_better(Scores score, Masks mask, Scores& best, Masks& found) {
        found = _mm256_blendv_epi8(found, mask, _mm256_castps_si256(_mm256_cmp_ps(score, best, _CMP_GT_OQ)));
        best = _mm256_max_ps(score, best);
    }
    static Masks all(uint32_t mask) { return _mm256_set1_epi32(int32_t(mask)); }

    // One row of all tiles as bools: a tile's four bits become the lowest bits of four bytes.
    static void flags(Masks found, int row, uint8_t* out) {
        const __m256i bits = _mm256_and_si256(_mm256_srlv_epi32(found, _mm256_set1_epi32(4 * row)), _mm256_set1_epi32(0xf));
        const __m256i spread = _mm256_mullo_epi32(bits, _mm256_set1_epi32(0x204081));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_and_si256(spread, _mm256_set1_epi32(0x01010101)));
    }

  private:
    static __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
    static __m128i wide(const float* w) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(w)); }
    static __m128i wide(const bf16* w) { return _mm_slli_epi32(_mm_cvtepu16_epi32(load64(w)), 16); }
    static __m128i wide(const fp16* w) { return _mm_castps_si128(_mm_cvtph_ps(load64(w))); }
};

}  // namespace
}  // namespace nm

#endif
