// Runs of numbers from their stored type to fp32 and back, by the rules of core/types.h.
#pragma once

#include <cstring>

#include "../../../core/types.h"
#include "spmm_vector.h"

namespace nm {
namespace {

inline void to_floats(const float* from, int64_t count, float* to) { std::memcpy(to, from, size_t(count) * sizeof(float)); }

inline void to_floats(const bf16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

inline void to_floats(const fp16* from, int64_t count, float* to) {
    int64_t i = 0;
#if defined(__AVX2__) && defined(__F16C__)
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < count; ++i) to[i] = to_float(from[i]);
}

inline void from_floats(const float* from, int64_t count, float* to) { std::memcpy(to, from, size_t(count) * sizeof(float)); }

inline void from_floats(const float* from, int64_t count, bf16* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = from_float<bf16>(from[i]);
}

inline void from_floats(const float* from, int64_t count, fp16* to) {
    int64_t i = 0;
#if defined(__AVX2__) && defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < count; ++i) to[i] = from_float<fp16>(from[i]);
}

}  // namespace
}  // namespace nm
