// PTX instructions without an equivalent single-instruction function in CUDA C++: asynchronous copies to shared memory, tensor
// cores, byte permutation, rounding of two numbers, wide stores. nvcc gets inline assembly, the emulator an implementation of the
// manual (emulator/ptx.h). All exist from sm_80 on.
//
// Fragments: lane l = 4 g + t; register r of A (16 x 16, row-major) holds A[g + 8 (r % 2)][2 t + 8 (r / 2)] in its low half
// and the next element of the row in its high half; register r of B (k x 8) holds B[2 t + 8 r][g] and the element below;
// d[i] is D[g + 8 (i / 2)][2 t + i % 2]. ldmatrix on rows of 8 fills A's registers from row-major A, B's from row-major B^T.
//
// Every lane of the warp must call ldmatrix and mma, at the same place.
#pragma once

#include <type_traits>

#include "../core/types.h"
#include "platform.h"

#if defined(NM_EMULATED)
#include "../emulator/ptx.h"
#endif

namespace nm::cuda {

#if !defined(NM_EMULATED)
NM_DEVICE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }
#endif

// __byte_perm for selectors without the bits 0x8888, which that one clears first.
NM_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
#if defined(NM_EMULATED)
    return __byte_perm(x, y, selector);
#else
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(selector));
    return result;
#endif
}

// Rounds two fp32 to nearest even, the first into the low half. T is bf16 or fp16.
template <class T>
NM_DEVICE uint32_t rounded_pair(float low, float high) {
#if defined(NM_EMULATED)
    return uint32_t(from_float<T>(low).bits) | uint32_t(from_float<T>(high).bits) << 16;
#else
    uint32_t result;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    }
    return result;
#endif
}

// Stores an aligned word of 1, 2, 4, 8 or 16 bytes to global memory with one instruction. The compiler would split a wide store in
// C++ if another branch stores the same elements one by one, because it merges the two.
template <class Word>
NM_DEVICE void st_global(void* to, Word word) {
#if defined(NM_EMULATED)
    emulator::st_global(to, word);
#else
    const size_t global = __cvta_generic_to_global(to);
    if constexpr (sizeof(Word) == 16) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w) : "memory");
    } else if constexpr (sizeof(Word) == 8) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(global), "r"(word.x), "r"(word.y) : "memory");
    } else if constexpr (sizeof(Word) == 4) {
        asm volatile("st.global.u32 [%0], %1;" ::"l"(global), "r"(word) : "memory");
    } else if constexpr (sizeof(Word) == 2) {
        asm volatile("st.global.u16 [%0], %1;" ::"l"(global), "h"(word) : "memory");
    } else {
        static_assert(sizeof(Word) == 1);
        asm volatile("st.global.u8 [%0], %1;" ::"l"(global), "r"(uint32_t(word)) : "memory");
    }
#endif
}

// Starts copying `filled` of Bytes (4, 8 or 16) from global to shared memory, both aligned to Bytes; the rest becomes zero, and
// with 0 nothing is read. 16 bytes bypass L1 unless caching is requested, best for tiles that are read once. Lines: prefetch the
// whole 128-byte line into L2.
template <int Bytes, bool ThroughL1 = Bytes != 16, bool Lines = false>
NM_DEVICE void cp_async(void* to, const void* from, int filled = Bytes) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
    static_assert((ThroughL1 || Bytes == 16) && !(ThroughL1 && Lines));
#if defined(NM_EMULATED)
    emulator::cp_async(to, from, Bytes, filled);
#else
    const uint32_t at = shared_address(to);
    const size_t global = __cvta_generic_to_global(from);
    if constexpr (ThroughL1) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(global), "n"(Bytes), "r"(filled) : "memory");
    } else if constexpr (Lines) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(at), "l"(global), "n"(Bytes), "r"(filled) : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(global), "n"(Bytes), "r"(filled) : "memory");
    }
#endif
}

// Makes a group of the copies that this thread has started since the last call.
NM_DEVICE void cp_async_commit() {
#if defined(NM_EMULATED)
    emulator::cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most Pending groups of this thread are in flight. Other threads' copies are visible after their wait and a
// barrier.
template <int Pending>
NM_DEVICE void cp_async_wait() {
#if defined(NM_EMULATED)
    emulator::cp_async_wait(Pending);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

// Loads Count (1, 2 or 4) matrices of 8 rows of 16 bytes from shared memory. Lane 8 i + j gives the address of row j of
// matrix i, a multiple of 16; addresses of further lanes are ignored.
template <int Count>
NM_DEVICE void ldmatrix(uint32_t (&to)[Count], const void* row) {
    static_assert(Count == 1 || Count == 2 || Count == 4);
#if defined(NM_EMULATED)
    emulator::ldmatrix(to, row, false);
#else
    const uint32_t at = shared_address(row);
    if constexpr (Count == 1) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(at) : "memory");
    } else if constexpr (Count == 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(at)
                     : "memory");
    }
#endif
}

// The same matrices transposed.
template <int Count>
NM_DEVICE void ldmatrix_trans(uint32_t (&to)[Count], const void* row) {
    static_assert(Count == 1 || Count == 2 || Count == 4);
#if defined(NM_EMULATED)
    emulator::ldmatrix(to, row, true);
#else
    const uint32_t at = shared_address(row);
    if constexpr (Count == 1) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(at) : "memory");
    } else if constexpr (Count == 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(at)
                     : "memory");
    }
#endif
}

// d += A B for A 16 x 16, B 16 x 8; T is bf16 or fp16, accumulators are fp32.
template <class T>
NM_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, fp16>);
#if defined(NM_EMULATED)
    emulator::mma<T>(d, a, b);
#else
#define NM_MMA(type)                                                                                                                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"     \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (std::is_same_v<T, bf16>) {
        NM_MMA("bf16");
    } else {
        NM_MMA("f16");
    }
#undef NM_MMA
#endif
}

// d += A B for A 16 x 8, B 8 x 8.
template <class T>
NM_DEVICE void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1]) {
    static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, fp16>);
#if defined(NM_EMULATED)
    emulator::mma<T>(d, a, b);
#else
#define NM_MMA(type)                                                                                                              \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]))
    if constexpr (std::is_same_v<T, bf16>) {
        NM_MMA("bf16");
    } else {
        NM_MMA("f16");
    }
#undef NM_MMA
#endif
}

// d += A B for A 16 x 32 with two of every four elements of a row, B 32 x 8 in four registers. a holds the 16 x 16 stored values,
// as above; metadata their positions in their groups of four, 2 bits each, ascending, lowest first. Of lanes 4 g to 4 g + 3, lane 2
// Selector supplies it for k < 16 and lane 2 Selector + 1 for the rest, each for row g in its low half and row g + 8 in its high
// half. Ordered = false is the form without ::ordered_metadata, slow on some newer GPUs.
template <class T, int Selector, bool Ordered = true>
NM_DEVICE void mma_sp_m16n8k32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t metadata) {
    static_assert((std::is_same_v<T, bf16> || std::is_same_v<T, fp16>)&&(Selector == 0 || Selector == 1));
#if defined(NM_EMULATED)
    emulator::mma_sp<T>(d, a, b, metadata, Selector, Ordered);
#else
#define NM_MMA(order, type)                                                                                                  \
    asm volatile("mma.sp" order ".sync.aligned.m16n8k32.row.col.f32." type "." type ".f32 "                                  \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"                       \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata), "n"(Selector))
    if constexpr (std::is_same_v<T, bf16> && Ordered) {
        NM_MMA("::ordered_metadata", "bf16");
    } else if constexpr (std::is_same_v<T, bf16>) {
        NM_MMA("", "bf16");
    } else if constexpr (Ordered) {
        NM_MMA("::ordered_metadata", "f16");
    } else {
        NM_MMA("", "f16");
    }
#undef NM_MMA
#endif
}

}  // namespace nm::cuda
