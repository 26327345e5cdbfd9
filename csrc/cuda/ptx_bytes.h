// The product of 8-bit integers on sparse tensor cores, from sm_80 on; its fragments of C and D are those of ptx.h.
#pragma once

#include "ptx.h"

#if defined(NM_EMULATED)
#include "../emulator/ptx_bytes.h"
#endif

namespace nm::cuda {

// d += A B for A 16 x 64 of int8 with two of every four elements of a row, B 64 x 8 of bytes, with a sign or without: register r of
// lane 4 g + t holds B[16 r + 4 t ...][g]. a holds the 16 x 32 stored values: register r of the lane those of row g + 8 (r % 2) from
// 4 t + 16 (r / 2) on. Their positions in groups of four, 2 bits each and ascending, lane 4 g + t supplies of row g + 8 (t % 2) for the
// 32 columns from 32 (t / 2) on.
template <bool Signed>
NM_DEVICE void mma_sp_m16n8k64(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t metadata) {
#if defined(NM_EMULATED)
    emulator::mma_sp_bytes<Signed>(d, a, b, metadata);
#else
#define NM_MMA(type)                                                                                                              \
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8." type ".s32 "                                   \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"                             \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata))
    if constexpr (Signed) {
        NM_MMA("s8");
    } else {
        NM_MMA("u8");
    }
#undef NM_MMA
#endif
}

}  // namespace nm::cuda
