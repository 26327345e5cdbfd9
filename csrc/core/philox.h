// Philox4x32-7 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): seven rounds, which
// pass every test there, of
//
//   (c0, c1, c2, c3) -> (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)),   k += (W0, W1)
//
// A 24-bit uniform is the upper 24 bits of a word.
#pragma once

#include "types.h"

namespace nm {

constexpr int kPhiloxRounds = 7;

struct Words {
    uint32_t w[4];
};

NM_HD uint32_t upper_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    return __umulhi(a, b);  // nvcc compiles the 64-bit product to one more addition
#else
    return uint32_t((uint64_t(a) * b) >> 32);
#endif
}

NM_HD Words philox4x32(Words c, uint32_t k0, uint32_t k1) {
    constexpr uint32_t a = 0xD2511F53u, b = 0xCD9E8D57u;
    for (int round = 0; round < kPhiloxRounds; ++round) {
        c = Words{{upper_product(b, c.w[2]) ^ c.w[1] ^ k0, b * c.w[2], upper_product(a, c.w[0]) ^ c.w[3] ^ k1, a * c.w[0]}};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// The four words of (seed, offset) at `counter`: key = (seed lo, hi), counter words = (counter lo, hi, offset lo, hi).
NM_HD Words philox_block(uint64_t seed, uint64_t offset, uint64_t counter) {
    const Words c{{uint32_t(counter), uint32_t(counter >> 32), uint32_t(offset), uint32_t(offset >> 32)}};
    return philox4x32(c, uint32_t(seed), uint32_t(seed >> 32));
}

}  // namespace nm
