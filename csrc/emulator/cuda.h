// The part of CUDA C++ that csrc/cuda uses, for a host compiler; block.h runs the device code.
//
// This is a test tool, not a simulator: it has no caches, no weak memory model, no occupancy and no timing. It detects wrong
// values, missing barriers, out-of-bounds and misaligned accesses, and uninitialised reads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../core/types.h"
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

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

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

// Reduces over the lanes of the mask with f(result, value), in lane order.
template <class T, class F>
T combined(uint32_t mask, const char* what, T data, const F& f) {
    const auto deposit = meet(mask, what, data);
    const int lanes = current().block->lanes(current());
    T result{};
    bool first = true;
    for (int lane = 0; lane < lanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        result = first ? taken<T>(deposit, lane) : f(result, taken<T>(deposit, lane));
        first = false;
    }
    return result;
}

// The value of lane `source`, or the caller's own if that is not in [low, high). NaN from lanes outside the mask, which
// hardware leaves undefined.
template <class T>
T shuffled(uint32_t mask, const char* what, T data, int source, int low, int high) {
    const auto deposit = meet(mask, what, data);
    return source < low || source >= high ? data : taken<T>(deposit, source);
}

// Checks the alignment of an access, as hardware requires.
template <class T>
T& aligned(void* address) {
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) throw std::runtime_error("misaligned address");
    return *static_cast<T*>(address);
}

// Atomically *address = f(*address); returns the old value.
template <class T, class F>
T exchanged(T* address, const F& f) {
    T old = aligned<T>(address), next;
    do next = f(old);
    while (!__atomic_compare_exchange(address, &old, &next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

}  // namespace nm::emulator

inline void __syncthreads(int line = __builtin_LINE()) { nm::emulator::current().block->barrier(nm::emulator::current(), line); }
inline void __syncwarp(uint32_t mask = ~0u) { nm::emulator::meet(mask, "__syncwarp", 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}

// Shuffles within sub-warps of `width` lanes that begin at `first`. As in the instruction shfl: lanes count modulo 32, or
// modulo the width if a source is named, and xor can reach earlier sub-warps.
#define NM_SHUFFLE(name, source, low)                                                                                             \
    template <class T>                                                                                                            \
    T __shfl##name##_sync(uint32_t mask, T value, int x, int width = 32) {                                                        \
        if (width < 1 || width > 32 || (width & (width - 1))) throw std::logic_error("shuffle: the width is not a power of two"); \
        const int own = nm::emulator::current().lane(), first = own & ~(width - 1);                                               \
        return nm::emulator::shuffled(mask, "__shfl" #name "_sync", value, source, low, first + width);                           \
    }
NM_SHUFFLE(, first + (x & (width - 1)), first)
NM_SHUFFLE(_xor, own ^ (x & 31), 0)
NM_SHUFFLE(_up, own - (x & 31), first)
NM_SHUFFLE(_down, own + (x & 31), first)
#undef NM_SHUFFLE

inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
    const uint32_t bit = predicate ? 1u << nm::emulator::current().lane() : 0u;
    return nm::emulator::combined(mask, "__ballot_sync", bit, [](uint32_t a, uint32_t b) { return a | b; });
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// For int and unsigned, the only types on sm_80.
#define NM_REDUCE(name, result)                                                                     \
    template <class T>                                                                              \
    T __reduce_##name##_sync(uint32_t mask, T x) {                                                  \
        static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>);                       \
        return nm::emulator::combined(mask, "__reduce_" #name "_sync", x, [](T a, T b) -> T { return result; }); \
    }
NM_REDUCE(add, T(unsigned(a) + unsigned(b)))
NM_REDUCE(min, b < a ? b : a)
NM_REDUCE(max, a < b ? b : a)
NM_REDUCE(and, a& b)
NM_REDUCE(or, a | b)
NM_REDUCE(xor, a ^ b)
#undef NM_REDUCE

#define NM_ATOMIC(name, result)                                                     \
    template <class T>                                                              \
    T atomic##name(T* address, std::common_type_t<T> x) {                           \
        return nm::emulator::exchanged(address, [=](T old) -> T { return result; }); \
    }
NM_ATOMIC(Add, old + x)
NM_ATOMIC(Min, x < old ? x : old)
NM_ATOMIC(Max, old < x ? x : old)
NM_ATOMIC(And, old& x)
NM_ATOMIC(Or, old | x)
NM_ATOMIC(Exch, (void(old), x))
#undef NM_ATOMIC
template <class T>
T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> x) {
    return nm::emulator::exchanged(address, [=](T old) { return old == compare ? x : old; });
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline uint32_t __float_as_uint(float x) { return nm::float_bits(x); }
inline float __uint_as_float(uint32_t b) { return nm::bits_float(b); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN becomes 0
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

template <class T>
constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T>
constexpr T max(T a, T b) { return a < b ? b : a; }
