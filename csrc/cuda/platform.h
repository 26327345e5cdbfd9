// Device code is compiled twice from the same sources: by nvcc for GPUs, and by the host compiler for the emulator, for tests. This
// file has the differences in syntax; memory.h and ptx.h have those in behaviour.
#pragma once

#include <cstdint>

#include "../core/types.h"

#if defined(NM_EMULATED)
#include "../emulator/cuda.h"
#else
#include <cuda_runtime.h>
#endif

// Declares an uninitialised object in shared memory: using Tile = float[32][33]; NM_SHARED(Tile, tile);
#if defined(NM_EMULATED)
#define NM_SHARED(Type, name)           \
    static const char nm_at_##name = 0; \
    Type& name = *static_cast<Type*>(nm::emulator::current().block->shared(&nm_at_##name, sizeof(Type), alignof(Type)))
#else
#define NM_SHARED(Type, name) __shared__ Type name
#endif

// Dynamic shared memory as Type*, aligned to 128 bytes.
#if defined(NM_EMULATED)
#define NM_DYNAMIC_SHARED(Type, name) Type* const name = static_cast<Type*>(nm::emulator::current().block->dynamic_shared())
#else
#define NM_DYNAMIC_SHARED(Type, name)                                \
    extern __shared__ __align__(128) unsigned char nm_dynamic_shared[]; \
    Type* const name = reinterpret_cast<Type*>(nm_dynamic_shared)
#endif

// Prevents unrolling of the next loop.
#if defined(NM_EMULATED)
#define NM_ONE_BY_ONE
#else
#define NM_ONE_BY_ONE _Pragma("unroll 1")
#endif

// Forces values read from memory to be read again instead of kept in registers.
#if defined(NM_EMULATED)
#define NM_READ_AGAIN()
#else
#define NM_READ_AGAIN() asm volatile("" ::: "memory")
#endif

#define NM_DEVICE __device__ __forceinline__
