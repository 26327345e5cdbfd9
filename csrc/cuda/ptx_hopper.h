// Instructions of sm_90a: tensor cores that read shared memory through descriptors (wgmma), copies of boxes (TMA), barriers that
// count bytes (mbarrier), and related ones. Section numbers refer to the PTX ISA manual, 9.0.
//
// The emulator does not support these: python_tests/ptx tests kernels of sm_90a by running their PTX. Shared memory is addressed by
// 32-bit addresses in its own window (`shared_address`). wgmma and TMA copies work in the async proxy: they see a thread's stores
// to shared memory after its fence_proxy_async and a barrier (9.7.15.4).
#pragma once

#include <cuda.h>

#include "../core/eight_bit.h"
#include "ptx.h"

namespace nm::cuda {

// Barriers in shared memory (9.7.13.15) ---------------------------------------------------------------------------------

// Initialises a barrier whose phases end after `count` arrivals. One thread calls it, then fence_mbarrier_init, then a barrier of
// the block or cluster follows.
NM_DEVICE void mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

NM_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and requires that many more bytes to be copied before the phase ends.
NM_DEVICE void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

NM_DEVICE void mbarrier_arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Arrives at the same barrier of another block of the cluster, without ordering this thread's writes, which would cost a fence of
// the whole GPU.
NM_DEVICE void mbarrier_arrive(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Waits for the end of the phase with this parity, 0 for the first phase. Before the first phase ends, the phase with parity 1
// counts as ended.
NM_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, over;\n"
            "}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Bulk copies (9.7.9.25, 9.7.9.27) --------------------------------------------------------------------------------------

// Copies bytes of global memory, 16-byte aligned and a multiple of 16.
NM_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Copies the box of a map at these coordinates, innermost first; elements outside become zero. The map must be a kernel parameter.
NM_DEVICE void tma_load(uint32_t to, const CUtensorMap& map, int inner, int outer, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map),
                 "r"(inner), "r"(outer), "r"(barrier)
                 : "memory");
}

// The same into every block of the cluster whose bit is set, at the same offset and with the same barrier in each.
NM_DEVICE void tma_load(uint32_t to, const CUtensorMap& map, int inner, int outer, uint32_t barrier, uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
                     to),
                 "l"(&map), "r"(inner), "r"(outer), "r"(barrier), "h"(blocks)
                 : "memory");
}

// Stores a box; elements outside are not written.
NM_DEVICE void tma_store(const CUtensorMap& map, int inner, int outer, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(inner), "r"(outer), "r"(from) : "memory");
}

// Makes a group of the stores that this thread has started since the last call.
NM_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most Pending groups of this thread still read shared memory.
template <int Pending>
NM_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

NM_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Threads ---------------------------------------------------------------------------------------------------------------

// A barrier of that many threads of the block. Number 0 is used by __syncthreads.
template <int Threads>
NM_DEVICE void named_barrier(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(Threads) : "memory");
}

// blockIdx.x, read where this is.
NM_DEVICE uint32_t block_again() {
    uint32_t block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

NM_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster (9.7.13.4), which makes their earlier writes visible.
NM_DEVICE void cluster_barrier() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::: "memory");
}

// Sets the number of registers per thread; all threads of a warpgroup must call it; 24 to 256, a multiple of 8 (9.7.19.5).
template <int Registers>
NM_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
NM_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Stores four matrices of 8 x 8 of 16 bits, each spread over the warp as an accumulator rounded in pairs is: lane l holds elements
// 2 (l % 4) and the next of row l / 4. Lane 8 i + j gives the address of row j of matrix i, or, transposed, of its column j.
template <bool kTransposed>
NM_DEVICE void stmatrix(uint32_t to, const uint32_t (&from)[4]) {
    if constexpr (kTransposed) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                     : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                     : "memory");
    }
}

// Products of a warpgroup (9.7.15) ---------------------------------------------------------------------------------------

// Call before the first product, and after other instructions have used registers of sums.
NM_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes a group of the products since the last call.
NM_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most Pending groups are in flight. Until then their sums, metadata and shared-memory operands must not be changed.
template <int Pending>
NM_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Stops the compiler from moving uses of these registers across this line, because asynchronous instructions also use them.
template <int Count>
NM_DEVICE void pin(float (&registers)[Count]) {
    NM_UNROLL
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int Count>
NM_DEVICE void pin(int32_t (&registers)[Count]) {
    NM_UNROLL
    for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Stores four sums of products, 16-byte aligned. As floats: as words, the compiler would keep sums in words between products, and copy them.
NM_DEVICE void store_four(float* to, const float* from) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3])
                 : "memory");
}

// Forces values derived from x to be recomputed after this line instead of kept in registers during a loop.
NM_DEVICE void pin(uint32_t& x) { asm volatile("" : "+r"(x)); }

// d (+)= A B for A 64 x 32 with two of every four elements of a row, packed to 64 x 16, and B 32 x N, both in shared memory; in 8 bits
// A is 64 x 64 and B 64 x N. d[4 j + 2 r + e] of lane 4 g + c of warp w is D[16 w + g + 8 r][8 j + 2 c + e].
//
// The lists of operands: registers of sums, as constraints and as operands.
#define NM_4(letter, i) letter(d[i]), letter(d[i + 1]), letter(d[i + 2]), letter(d[i + 3])
#define NM_8(letter, i) NM_4(letter, i), NM_4(letter, i + 4)
#define NM_32(letter, i) NM_8(letter, i), NM_8(letter, i + 8), NM_8(letter, i + 16), NM_8(letter, i + 24)
#define NM_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NM_D32                                                                                                                       \
    NM_D0 ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NM_D64                                                                                                                       \
    NM_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "    \
           "%55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NM_D96                                                                                                                       \
    NM_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, "    \
           "%87, %88, %89, %90, %91, %92, %93, %94, %95"

// In 16 bits. A lies by k, B by k or, with kByColumn, by column. Metadata is the word of the thread in the order "wgmma.sp" of
// reference/layouts.py: the pair of lanes named by Selector supplies it (9.7.15.6.2).
template <class T, int Selector, bool kByColumn, int Sums>
NM_DEVICE void wgmma_sp(float (&d)[Sums], uint64_t a, uint64_t b, uint32_t metadata, bool add) {
    static_assert((std::is_same_v<T, bf16> || std::is_same_v<T, fp16>)&&(Selector == 0 || Selector == 1));
#define NM_WGMMA(type, n, sums, a_, b_, metadata_, selector_, by_column_, add_, ...)                                                 \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_ ", 0;\n"                                                             \
                 "wgmma.mma_async.sp.sync.aligned.m64n" #n "k32.f32." type "." type " {" sums "}, %" #a_ ", %" #b_ ", %" #metadata_   \
                 ", %" #selector_ ", add, 1, 1, 0, %" #by_column_ ";\n}"                                                             \
                 : __VA_ARGS__                                                                                                       \
                 : "l"(a), "l"(b), "r"(metadata), "n"(Selector), "n"(int(kByColumn)), "r"(int(add)))
#define NM_WGMMA_OF(...)                             \
    if constexpr (std::is_same_v<T, bf16>) {         \
        NM_WGMMA("bf16", __VA_ARGS__);               \
    } else {                                         \
        NM_WGMMA("f16", __VA_ARGS__);                \
    }
    if constexpr (Sums == 8) {
        NM_WGMMA_OF(16, NM_D0, 8, 9, 10, 11, 12, 13, NM_8("+f", 0))
    } else if constexpr (Sums == 32) {
        NM_WGMMA_OF(64, NM_D32, 32, 33, 34, 35, 36, 37, NM_32("+f", 0))
    } else if constexpr (Sums == 64) {
        NM_WGMMA_OF(128, NM_D64, 64, 65, 66, 67, 68, 69, NM_32("+f", 0), NM_32("+f", 32))
    } else {
        static_assert(Sums == 96);
        NM_WGMMA_OF(192, NM_D96, 96, 97, 98, 99, 100, 101, NM_32("+f", 0), NM_32("+f", 32), NM_32("+f", 64))
    }
#undef NM_WGMMA
#undef NM_WGMMA_OF
}

// In 8 bits, where both operands lie by k. Metadata is a word of the thread in the order "wgmma.sp.8bit"; every lane supplies it.
// Sums of int8 are int32.
template <class A, class B, class Sum, int Sums>
NM_DEVICE void wgmma_sp_8bit(Sum (&d)[Sums], uint64_t a, uint64_t b, uint32_t metadata, bool add) {
#define NM_WGMMA(types, scales, n, sums, a_, b_, metadata_, add_, ...)                                                               \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_ ", 0;\n"                                                             \
                 "wgmma.mma_async.sp.sync.aligned.m64n" #n "k64." types " {" sums "}, %" #a_ ", %" #b_ ", %" #metadata_              \
                 ", 0, add" scales ";\n}"                                                                                            \
                 : __VA_ARGS__                                                                                                       \
                 : "l"(a), "l"(b), "r"(metadata), "r"(int(add)))
#define NM_WGMMA_OF(letter, types, scales)                                                                                           \
    if constexpr (Sums == 64) {                                                                                                      \
        NM_WGMMA(types, scales, 128, NM_D64, 64, 65, 66, 67, NM_32(letter, 0), NM_32(letter, 32));                                   \
    } else {                                                                                                                         \
        static_assert(Sums == 96);                                                                                                   \
        NM_WGMMA(types, scales, 192, NM_D96, 96, 97, 98, 99, NM_32(letter, 0), NM_32(letter, 32), NM_32(letter, 64));                \
    }
    if constexpr (std::is_same_v<A, int8_t>) {
        static_assert(std::is_same_v<B, int8_t> && std::is_same_v<Sum, int32_t>);
        NM_WGMMA_OF("+r", "s32.s8.s8", "")
    } else if constexpr (std::is_same_v<A, e4m3> && std::is_same_v<B, e4m3>) {
        NM_WGMMA_OF("+f", "f32.e4m3.e4m3", ", 1, 1")
    } else if constexpr (std::is_same_v<A, e4m3>) {
        NM_WGMMA_OF("+f", "f32.e4m3.e5m2", ", 1, 1")
    } else if constexpr (std::is_same_v<B, e4m3>) {
        NM_WGMMA_OF("+f", "f32.e5m2.e4m3", ", 1, 1")
    } else {
        NM_WGMMA_OF("+f", "f32.e5m2.e5m2", ", 1, 1")
    }
#undef NM_WGMMA
#undef NM_WGMMA_OF
}

#undef NM_4
#undef NM_8
#undef NM_32
#undef NM_D0
#undef NM_D32
#undef NM_D64
#undef NM_D96

}  // namespace nm::cuda
