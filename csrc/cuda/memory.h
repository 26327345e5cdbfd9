// Reads and writes of several elements at once, at most 16 bytes per thread.
#pragma once

#include "../core/types.h"
#include "platform.h"
#include "ptx.h"

namespace nm::cuda {

template <int Bytes>
struct WordOf;
template <>
struct WordOf<1> {
    using type = uint8_t;
};
template <>
struct WordOf<2> {
    using type = uint16_t;
};
template <>
struct WordOf<4> {
    using type = uint32_t;
};
template <>
struct WordOf<8> {
    using type = uint2;
};
template <>
struct WordOf<16> {
    using type = uint4;
};

// The unsigned integer or vector type with that many bytes.
template <int Bytes>
using Word = typename WordOf<Bytes>::type;

template <int Bytes>
NM_DEVICE Word<Bytes> load_word(const void* from) {
#if defined(NM_EMULATED)
    return emulator::aligned<Word<Bytes>>(const_cast<void*>(from));
#else
    return *static_cast<const Word<Bytes>*>(from);
#endif
}

template <int Bytes>
NM_DEVICE void store_word(void* to, Word<Bytes> word) {
#if defined(NM_EMULATED)
    emulator::aligned<Word<Bytes>>(to) = word;
#else
    *static_cast<Word<Bytes>*>(to) = word;
#endif
}

// to[i] = from[i] for i < Count; the size is a power of two, and `from` is aligned to it (at most 16 bytes).
template <int Count, class T>
NM_DEVICE void load_wide(const T* from, T* to) {
    constexpr int bytes = Count * int(sizeof(T)), width = bytes < 16 ? bytes : 16;
    NM_UNROLL
    for (int i = 0; i < bytes / width; ++i) {
        const Word<width> word = load_word<width>(reinterpret_cast<const char*>(from) + i * width);
        memcpy(reinterpret_cast<char*>(to) + i * width, &word, width);
    }
}

template <int Count, class T>
NM_DEVICE void store_wide(T* to, const T* from) {
    constexpr int bytes = Count * int(sizeof(T)), width = bytes < 16 ? bytes : 16;
    NM_UNROLL
    for (int i = 0; i < bytes / width; ++i) {
        Word<width> word;
        memcpy(&word, reinterpret_cast<const char*>(from) + i * width, width);
        store_word<width>(reinterpret_cast<char*>(to) + i * width, word);
    }
}

// The same to global memory, one store per word regardless of what the compiler knows about the address.
template <int Count, class T>
NM_DEVICE void store_global(T* to, const T* from) {
    constexpr int bytes = Count * int(sizeof(T)), width = bytes < 16 ? bytes : 16;
    NM_UNROLL
    for (int i = 0; i < bytes / width; ++i) {
        Word<width> word;
        memcpy(&word, reinterpret_cast<const char*>(from) + i * width, width);
        st_global(reinterpret_cast<char*>(to) + i * width, word);
    }
}

// Reads from an address in a table, for which the compiler would not know that it is global memory and would emit generic loads.
// Bypasses L1, because each is read once.
template <int Count, class T>
NM_DEVICE void load_streamed(const T* from, T* to) {
#if defined(NM_EMULATED)
    load_wide<Count>(from, to);
#else
    constexpr int bytes = Count * int(sizeof(T)), width = bytes < 16 ? bytes : 16;
    NM_UNROLL
    for (int i = 0; i < bytes / width; ++i) {
        const Word<width> word = __ldcg(reinterpret_cast<const Word<width>*>(from) + i);
        memcpy(reinterpret_cast<char*>(to) + i * width, &word, width);
    }
#endif
}

// Loads or stores the first `count` of Count elements, the others as zeros; in one access if all are present and `wide` says that
// addresses are aligned.
template <int Count, class T>
NM_DEVICE void load_some(const T* from, T* to, int64_t count, bool wide) {
    if (wide && count >= Count) return load_wide<Count>(from, to);
    NM_UNROLL
    for (int i = 0; i < Count; ++i) to[i] = i < count ? from[i] : T{};
}

template <int Count, class T>
NM_DEVICE void store_some(T* to, const T* from, int64_t count, bool wide) {
    if (wide && count >= Count) return store_global<Count>(to, from);
    NM_UNROLL
    for (int i = 0; i < Count; ++i) {
        if (i < count) to[i] = from[i];
    }
}

// Whether all addresses (or strides in bytes) are multiples of 16.
template <class... A>
inline bool multiples_of_16(A... addresses) {
    return ((uintptr_t(addresses) | ...) & 15) == 0;
}

}  // namespace nm::cuda
