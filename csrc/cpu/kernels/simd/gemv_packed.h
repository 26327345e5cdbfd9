// What the blocks of gemv_avx512.h and gemv_avx2.h share: how 16 stored values of an N:M row lie in memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../../core/bitpack.h"

namespace nm {
namespace {

template <class W>
W load_word(const uint8_t* bytes) {
    W word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

template <int N, int M>
struct Packed {
    static_assert(16 % N == 0 && 32 % M == 0 && M > N, "a block is whole groups, and no group straddles two pairs of registers");
    static constexpr int kBits = M <= 4 ? 2 : M <= 16 ? 4 : 8;
    static constexpr int kInputs = 16 / N * M, kIndexBytes = 2 * kBits;

    // Not zero where one of the 16 indices is M or above: M is a power of two, so such an index has a bit that none may have.
    static uint64_t damage(const uint8_t* indices) {
        constexpr uint64_t ones = 0x0101010101010101u;
        if (M == 1 << kBits) return 0;
        if (kBits == 2) return load_word<uint32_t>(indices) & (ones * 0xaa);
        if (kBits == 4) return load_word<uint64_t>(indices) & (ones * ((M == 8 ? 0x8 : 0) * 0x11));
        return (load_word<uint64_t>(indices) | load_word<uint64_t>(indices + 8)) & (ones * 0xe0);
    }
};

}  // namespace
}  // namespace nm
