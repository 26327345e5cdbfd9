// From 64 bits to 64 elements and back, element by element: the plain form of pack_avx512.h and pack_avx2.h.
#pragma once

#include <cstring>

#include "../../../core/types.h"

namespace nm {
namespace {

// Bit i: flags[i] is not 0.
inline uint64_t bits_of(const uint8_t* flags) {
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) bits |= uint64_t(flags[i] != 0) << i;
    return bits;
}

// flags[i] = bit i.
inline void flags_of(uint64_t bits, uint8_t* flags) {
    for (int i = 0; i < 64; ++i) flags[i] = (bits >> i) & 1;
}

// out[i] = w[i] where bit i is set, +0.0 elsewhere.
template <class T>
void pick64(const T* w, uint64_t bits, T* out) {
    for (int i = 0; i < 64; ++i) out[i] = kept_or_zero(w[i], (bits >> i) & 1);
}

// The elements of the set bits, one after another; returns where the next go. May write up to 64 in all.
template <class T>
T* gather64(const T* w, uint64_t bits, T* out) {
    for (; bits; bits &= bits - 1) *out++ = w[__builtin_ctzll(bits)];
    return out;
}

// The same where every eight bits have Count set.
constexpr bool kGatherBytes = true;  // faster than gather64 and pack_positions

template <int, class T>
void gather_bytes(const T* w, uint64_t bits, T* out) {
    gather64(w, bits, out);
}

// The inverse: out[i] = the next value where bit i is set, +0.0 elsewhere. Returns the value after them.
template <class T>
const T* scatter64(const T* values, uint64_t bits, T* out) {
    std::memset(static_cast<void*>(out), 0, 64 * sizeof(T));
    for (; bits; bits &= bits - 1) out[__builtin_ctzll(bits)] = *values++;
    return values;
}

}  // namespace
}  // namespace nm
