// The part of CUDA C++ that csrc/cuda uses, for a host compiler: the device code itself is compiled and run, by block.h.
//
// This is a test instrument, not a simulator: it has no caches, no memory model weaker than the host's, no occupancy and
// no time. It shows wrong values, missing barriers, out-of-bounds and misaligned accesses, and reads of what nobody wrote.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "block.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

#define threadIdx (nm::emulator::current().index)
#define blockIdx (nm::emulator::current().block->index)
#define blockDim (nm::emulator::current().block->size)
#define gridDim (nm::emulator::current().block->count)

constexpr int warpSize = 32;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace nm::emulator {

template <class T>
const unsigned char (*meet(uint32_t mask, const char* what, const T& data))[kDeposit] {
    static_assert(std::is_trivially_copyable_v<T>);
    Thread& thread = current();
    return thread.block->meet(thread, mask, what, &data, sizeof data);
}

template <class T>
T taken(const unsigned char (*deposit)[kDeposit], int lane) {
    T data;
    std::memcpy(&data, deposit[lane], sizeof data);
    return data;
}

// f(result, value) over the lanes of the mask, in order of lane.
template <class T, class F>
T combined(uint32_t mask, const char* what, T data, const F& f) {
    const auto deposit = meet(mask, what, data);
    const int lanes = int(current().block->size.x) - (current().number - current().lane());
    T result{};
    bool first = true;
    for (int lane = 0; lane < kLanes && lane < lanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        result = first ? taken<T>(deposit, lane) : f(result, taken<T>(deposit, lane));
        first = false;
    }
    return result;
}

// The value of a lane of the caller's part of the warp, `width` lanes wide; its own where that is outside.
template <class T>
T shuffled(uint32_t mask, const char* what, T data, int from, int width) {
    const auto deposit = meet(mask, what, data);
    const int lane = current().lane(), first = lane / width * width;
    return from < first || from >= first + width ? data : taken<T>(deposit, from);
}

// An access of `bytes` at once, as the hardware wants it.
template <class T>
T& aligned(void* address) {
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) throw std::runtime_error("misaligned address");
    return *static_cast<T*>(address);
}

}  // namespace nm::emulator

inline void __syncthreads() {
    auto& thread = nm::emulator::current();
    thread.block->barrier(thread);
}

inline void __syncwarp(uint32_t mask = ~0u) { nm::emulator::meet(mask, "__syncwarp", 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __shfl_sync(uint32_t mask, T value, int lane, int width = 32) {
    const int first = nm::emulator::current().lane() / width * width;
    return nm::emulator::shuffled(mask, "__shfl_sync", value, first + lane % width, width);
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int flip, int width = 32) {
    return nm::emulator::shuffled(mask, "__shfl_xor_sync", value, nm::emulator::current().lane() ^ flip, width);
}

template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned by, int width = 32) {
    return nm::emulator::shuffled(mask, "__shfl_up_sync", value, nm::emulator::current().lane() - int(by), width);
}

template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned by, int width = 32) {
    return nm::emulator::shuffled(mask, "__shfl_down_sync", value, nm::emulator::current().lane() + int(by), width);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
    const uint32_t bit = predicate ? 1u << nm::emulator::current().lane() : 0u;
    return nm::emulator::combined(mask, "__ballot_sync", bit, [](uint32_t a, uint32_t b) { return a | b; });
}

inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t x) {
    return nm::emulator::combined(mask, "__reduce_add_sync", x, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t x) {
    return nm::emulator::combined(mask, "__reduce_max_sync", x, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t x) {
    return nm::emulator::combined(mask, "__reduce_or_sync", x, [](uint32_t a, uint32_t b) { return a | b; });
}

template <class T>
T atomicAdd(T* address, T value) {
    if constexpr (std::is_integral_v<T>) return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
    T old, sum;
    __atomic_load(address, &old, __ATOMIC_SEQ_CST);
    do sum = old + value;
    while (!__atomic_compare_exchange(address, &old, &sum, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

template <class T>
T atomicMax(T* address, T value) {
    T old = __atomic_load_n(address, __ATOMIC_SEQ_CST);
    while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return old;
}

template <class T>
T atomicOr(T* address, T value) {
    return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);
}

template <class T>
T atomicExch(T* address, T value) {
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline uint32_t __brev(uint32_t x) {
    uint32_t y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
    return y;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}
inline float __uint_as_float(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }

// Byte i of the result is byte (selector >> 4 i & 7) of the eight bytes y:x; bit 3 spreads the byte's sign instead.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = uint64_t(y) << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t code = selector >> (4 * i) & 15u, byte = uint32_t(bytes >> (8 * (code & 7u))) & 255u;
        result |= (code & 8u ? (byte & 128u ? 255u : 0u) : byte) << (8 * i);
    }
    return result;
}

inline uint32_t __funnelshift_l(uint32_t lo, uint32_t hi, uint32_t shift) {
    return uint32_t((uint64_t(hi) << 32 | lo) << (shift & 31) >> 32);
}
inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, uint32_t shift) { return uint32_t((uint64_t(hi) << 32 | lo) >> (shift & 31)); }

template <class T>
constexpr T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
    return a < b ? b : a;
}
