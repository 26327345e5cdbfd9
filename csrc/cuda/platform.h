// Device code is compiled twice from the same sources: by nvcc for GPUs, and by the host compiler for the emulator, which
// runs it in tests. What the two spell differently is here; memory.h and ptx.h hold what they do differently.
#pragma once

#include <cstdint>

#include "../core/types.h"

#if defined(NM_EMULATED)
#include "../emulator/cuda.h"
#else
#include <cuda_runtime.h>
#endif

// One object of the block's shared memory, without an initial value: using Tile = float[32][33]; NM_SHARED(Tile, tile);
#if defined(NM_EMULATED)
#define NM_SHARED(Type, name)           \
    static const char nm_at_##name = 0; \
    Type& name = *static_cast<Type*>(nm::emulator::current().block->shared(&nm_at_##name, sizeof(Type), alignof(Type)))
#else
#define NM_SHARED(Type, name) __shared__ Type name
#endif

// The shared memory whose size the launch gives, seen as Type*, aligned to 128 bytes.
#if defined(NM_EMULATED)
#define NM_DYNAMIC_SHARED(Type, name) Type* const name = static_cast<Type*>(nm::emulator::current().block->dynamic_shared())
#else
#define NM_DYNAMIC_SHARED(Type, name)                                \
    extern __shared__ __align__(128) unsigned char nm_dynamic_shared[]; \
    Type* const name = reinterpret_cast<Type*>(nm_dynamic_shared)
#endif

// The loop after it stays a loop.
#if defined(NM_EMULATED)
#define NM_ONE_BY_ONE
#else
#define NM_ONE_BY_ONE _Pragma("unroll 1")
#endif

// What was read from memory before this is read again after it, instead of being kept in registers.
#if defined(NM_EMULATED)
#define NM_READ_AGAIN()
#else
#define NM_READ_AGAIN() asm volatile("" ::: "memory")
#endif

#define NM_DEVICE __device__ __forceinline__
