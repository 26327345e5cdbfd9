// Sixteen 4x4 tiles side by side, one per lane, with AVX-512.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>

#include "../../../core/types.h"

namespace nm {
namespace {

struct Tiles {
    static constexpr int kCount = 16;
    using Scores = __m512;
    using Masks = __m512i;

    // One row: the magnitudes in the four columns of every tile; NaN counts as infinity.
    template <class T>
    static void columns(const T* w, Scores* column) {
        const __m512i place = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        __m512i v[4];
        for (int i = 0; i < 4; ++i) {
            const __m512i magnitude = _mm512_and_si512(wide(w + 16 * i), _mm512_set1_epi32(0x7fffffff));
            v[i] = _mm512_min_epi32(magnitude, _mm512_set1_epi32(0x7f800000));
        }
        for (int j = 0; j < 4; ++j) {
            const __m512i from = _mm512_add_epi32(place, _mm512_set1_epi32(j));
            const __m512i low = _mm512_permutex2var_epi32(v[0], from, v[1]), high = _mm512_permutex2var_epi32(v[2], from, v[3]);
            column[j] = _mm512_castsi512_ps(_mm512_mask_mov_epi32(low, 0xff00, high));
        }
    }

    static Scores plus(Scores a, Scores b) { return _mm512_add_ps(a, b); }
    static Scores none() { return _mm512_set1_ps(-1.0f); }

    // Where the score is better than the best so far, the mask is found.
    static void keep_better(Scores score, Masks mask, Scores& best, Masks& found) {
        found = _mm512_mask_mov_epi32(found, _mm512_cmp_ps_mask(score, best, _CMP_GT_OQ), mask);
        best = _mm512_max_ps(score, best);
    }
    static Masks all(uint32_t mask) { return _mm512_set1_epi32(int32_t(mask)); }

    // One row of all tiles as bools: a tile's four bits become the lowest bits of four bytes.
    static void flags(Masks found, int row, uint8_t* out) {
        const __m512i bits = _mm512_and_si512(_mm512_srlv_epi32(found, _mm512_set1_epi32(4 * row)), _mm512_set1_epi32(0xf));
        const __m512i spread = _mm512_mullo_epi32(bits, _mm512_set1_epi32(0x204081));
        _mm512_storeu_si512(out, _mm512_and_si512(spread, _mm512_set1_epi32(0x01010101)));
    }

  private:
    static __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static __m512i wide(const float* w) { return _mm512_loadu_si512(w); }
    static __m512i wide(const bf16* w) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(w)), 16); }
    static __m512i wide(const fp16* w) { return _mm512_castps_si512(_mm512_cvtph_ps(load256(w))); }
};

}  // namespace
}  // namespace nm

#endif
