// 64 elements by 64 bits: bool <-> bit, pruning, gathering the kept ones and putting them back.
#pragma once

#if defined(__AVX512F__)
#include "simd/pack_avx512.h"
#elif defined(__AVX2__)
#include "simd/pack_avx2.h"
#else
#include "simd/pack_plain.h"
#endif
