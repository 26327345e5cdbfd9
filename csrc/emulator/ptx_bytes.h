// The instruction of csrc/cuda/ptx_bytes.h as the PTX ISA manual defines it; its sums are exact.
#pragma once

#include "ptx.h"

namespace nm::emulator {

// "Matrix Fragments for sparse mma.m16n8k64 with .u8 / .s8 integer type": a packed row has two of every four, in the fragments of a dense
// 16 x 32; lane 4 g + t supplies the indices of row g + 8 (t % 2), 32 columns from 32 (t / 2) on.
template <bool Signed>
void mma_sp_bytes(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t metadata) {
    const Operands<4> mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1], b[2], b[3]}, metadata};
    const auto deposit = of_all_lanes(Signed ? "mma.sp of int8" : "mma.sp of int8 and uint8", mine);
    const int group = current().lane() / 4, pair = current().lane() % 4 * 2;
    for (int i = 0; i < 4; ++i) {
        const int row = group + 8 * (i / 2), col = pair + i % 2;
        int64_t sum = d[i];
        for (int p = 0; p < 32; ++p) {
            const uint32_t word = taken<Operands<4>>(deposit, 4 * (row % 8) + row / 8 + 2 * (p / 16)).metadata;
            const uint32_t both = word >> (p % 16 / 2 * 4), first = both & 3u, second = both >> 2 & 3u;
            if (first >= second) throw std::runtime_error("mma.sp: metadata that the instruction does not take");
            const int k = p / 2 * 4 + int(p % 2 ? second : first);
            const uint32_t of_a = taken<Operands<4>>(deposit, 4 * (row % 8) + p % 16 / 4).a[row / 8 + p / 16 * 2];
            const uint32_t of_b = taken<Operands<4>>(deposit, 4 * col + k % 16 / 4).b[k / 16] >> (8 * (k % 4)) & 255u;
            sum += int64_t(int8_t(of_a >> (8 * (p % 4)))) * (Signed ? int64_t(int8_t(of_b)) : int64_t(of_b));
        }
        if (sum != int64_t(int32_t(sum))) throw std::runtime_error("mma.sp: a sum of integers that does not fit 32 bits");
        d[i] = int32_t(sum);
    }
}

}  // namespace nm::emulator
