// 16 stored values of an N:M row, in one or two registers, against the 16 M/N inputs that they choose from.
//
// Lane l of a register holds its stored value l. Its group starts at input (l / N) M, so the register that holds its input is known to
// the compiler, and one permute per register (AVX-512: per pair of them) brings the inputs of all its lanes. Nothing is gathered: a
// gather of 16 floats takes 20 cycles on Zen 5, the 8 permutes of 1:16 about 10 (AMD EPYC, 2026-11-21). Only AVX2's groups of more
// than 8 inputs spread over several registers, and are gathered.
#pragma once

#include "simd/simd.h"

#if defined(__AVX2__)

namespace nm {
namespace {

template <int N, int M>
struct FewBlock {
    static constexpr int kBits = M <= 4 ? 2 : M <= 16 ? 4 : 8;
    static constexpr int kStored = 16, kInputs = kStored / N * M, kIndexBytes = kStored * kBits / 8;
    static constexpr int kRegisters = kStored / kLanes, kRegisterInputs = kInputs / kRegisters;
    static constexpr int kReach = kLanes == 16 ? 32 : 8;  // inputs that one permute chooses from
    static constexpr int kPermutes = kRegisterInputs / kReach;
    static_assert(kLanes % N == 0 && M > N, "a register is whole groups");

    // For register I of a block: where the input of each lane is among those that its permute chooses from; what is above these bits
    // does not matter. Of larger groups: which input of the register's it is.
    template <int I>
    static Uints places(const uint8_t* indices) {
        const Uints index = indices_of<I>(indices);
        if constexpr (M == kReach) return index;
        static constexpr auto start = [](int l) { return l / N * M; };
        static constexpr Table<uint32_t, decltype(start)> group(start);
        const Uints below = splat(uint32_t(M - 1)), start_of = group.template as<Uints>();
#if defined(__AVX512F__)  // one instruction that writes over the indices, not over a constant
        return Uints(_mm512_ternarylogic_epi32(Register(index), Register(below), Register(start_of), 0xea));
#else
        return (index & below) | start_of;
#endif
    }

    // Not zero where an index is M or above: M is a power of two, so such an index has a bit that none may have.
    static uint64_t damage(const uint8_t* indices) {
        if constexpr (M == 1 << kBits) return 0;
        constexpr uint64_t forbidden = 0x0101010101010101u * (((1u << kBits) - M) * (kBits == 4 ? 0x11u : 1u));
        uint64_t found = 0;
        for (int i = 0; i < kIndexBytes; i += 8) {
            uint64_t word = 0;
            std::memcpy(&word, indices + i, kIndexBytes < 8 ? kIndexBytes : 8);
            found |= word & forbidden;
        }
        return found;
    }

    // The inputs of all lanes, x being the first that the register chooses from.
    static Floats inputs(Uints places, const float* x) {
        if constexpr (M > kReach) {
            return gathered(x, places);
        } else {
            Floats chosen = permuted(x, places);
            each<kPermutes - 1>([&](auto i) {
                constexpr int kNext = i + 1;
                chosen = moved<kNext>(chosen, permuted(x + kNext * kReach, places));
            });
            return chosen;
        }
    }

  private:
    template <int I>
    static Uints indices_of(const uint8_t* indices) {
#if !defined(__AVX512F__)  // one word for both registers: a load broadcasts it
        if constexpr (kBits == 2) return splat(word_at<uint32_t>(indices)) >> (Uints{0, 2, 4, 6, 8, 10, 12, 14} + 16u * I);
#endif
        return low_indices<kBits>(indices + I * kLanes * kBits / 8);
    }

    // The lanes of permute I from the second, all others from the first.
    template <int I>
    static Floats moved(Floats others, Floats mine) {
        constexpr int kMine = kLanes / kPermutes;
        constexpr unsigned lanes = ((1u << kMine) - 1) << (I * kMine);
#if defined(__AVX512F__)
        return _mm512_mask_mov_ps(others, __mmask16(lanes), mine);
#else
        return _mm256_blend_ps(others, mine, int(lanes));
#endif
    }

#if defined(__AVX512F__)
    static Floats permuted(const float* x, Uints places) { return _mm512_permutex2var_ps(load(x), Register(places), load(x + 16)); }
    static Floats gathered(const float* x, Uints places) { return _mm512_i32gather_ps(Register(places), x, 4); }
#else
    static Floats permuted(const float* x, Uints places) { return _mm256_permutevar8x32_ps(load(x), Register(places)); }
    static Floats gathered(const float* x, Uints places) { return _mm256_i32gather_ps(x, Register(places), 4); }
#endif
};

}  // namespace
}  // namespace nm

#endif
