// kLanes x kLanes tiles between rows of a tensor (any element type) and vectors of one element of each of kLanes rows.
#pragma once

#include <algorithm>

#include "simd/simd.h"

namespace nm {
namespace {

template <bool Stream>
NM_INLINE void store_words(char* to, Uints words) {
    if constexpr (Stream) stream_store(to, words);
    else store_as(to, words);
}

// `bytes` bytes to each of `lanes` rows, `stride` bytes apart: 32-bit word i of row l is lane l of words(i), and
// words.transposed(i, r) has words i .. i + kLanes of row l in r[l].
template <bool Stream, class W>
NM_INLINE void store_rows(const W& words, int64_t bytes, char* to, int64_t stride, int lanes) {
    for (int64_t done = 0; done < bytes; done += 4 * kLanes) {
        const int64_t there = std::min<int64_t>(bytes - done, 4 * kLanes);
        Uints r[kLanes];
        if (there == 4 * kLanes) {
            words.transposed(done / 4, r);
        } else {
            for (int i = 0; i < kLanes; ++i) r[i] = 4 * i < there ? words(done / 4 + i) : Uints{};
            transpose(r);
        }
        if (there == 4 * kLanes && lanes == kLanes) {
            NM_UNROLL_16 for (int l = 0; l < kLanes; ++l) store_words<Stream>(to + l * stride + done, r[l]);
        } else {
            for (int l = 0; l < std::min(lanes, kLanes); ++l) std::memcpy(to + l * stride + done, &r[l], size_t(there));
        }
    }
}

// Word i of a row of `count` elements of type T, whose element k is x[k * kLanes + lane].
template <class T>
struct RowWords {
    const float* x;
    int64_t count;

    NM_INLINE Uints operator()(int64_t i) const {
        if constexpr (sizeof(T) == 4) return bits_of(load(x + i * kLanes));
        const int64_t k = 2 * i;
        const Uints low = narrowed<T>(load(x + k * kLanes));
        return k + 1 < count ? low | narrowed<T>(load(x + (k + 1) * kLanes)) << 16 : low;
    }

    NM_INLINE void transposed(int64_t first, Uints* r) const {
        if constexpr (sizeof(T) == 4) {
            load_transposed(x + first * kLanes, sizeof(Uints), r);
        } else {
            NM_UNROLL_16 for (int i = 0; i < kLanes; ++i) r[i] = (*this)(first + i);
            transpose(r);
        }
    }
};

template <class T>
NM_INLINE void store_elements(const float* x, int64_t count, T* to, int64_t stride, int lanes, bool stream) {
    const int64_t bytes = count * int64_t(sizeof(T)), step = stride * int64_t(sizeof(T));
    char* first = reinterpret_cast<char*>(to);
    if (stream && (reinterpret_cast<uintptr_t>(first) | uintptr_t(step)) % sizeof(Uints) == 0) {
        store_rows<true>(RowWords<T>{x, count}, bytes, first, step, lanes);
    } else {
        store_rows<false>(RowWords<T>{x, count}, bytes, first, step, lanes);
    }
}

// 32 bits of each of kLanes rows as floats: one element, or the lower and the upper of two.
NM_INLINE void store_widened(Uints word, float* x, float) { store(x, float_of(word)); }

NM_INLINE void store_widened(Uints word, float* x, bf16) {
    store(x, float_of(word << 16));
    store(x + kLanes, float_of(word & 0xffff0000u));
}

NM_INLINE void store_widened(Uints word, float* x, fp16) {
    store(x, widened_lower(word));
    store(x + kLanes, widened_upper(word));
}

// As many elements as fit a vector, zeros past the first `there`.
template <class T>
NM_INLINE Uints row_words(const T* from, int64_t there) {
    constexpr int64_t each = int64_t(sizeof(Uints) / sizeof(T));
    Uints words = {};
    std::memcpy(&words, from, there >= each ? sizeof words : size_t(std::max<int64_t>(there, 0)) * sizeof(T));
    return words;
}

// The other way: `count` elements of each of `lanes` rows, `stride` elements apart, to x. `there` >= count may be read
// from a row; x has room for count rounded up to what two vectors hold.
template <class T>
NM_INLINE void load_elements(const T* from, int64_t stride, int lanes, int64_t count, int64_t there, float* x) {
    constexpr int per = 4 / sizeof(T), each = per * kLanes;
    for (int64_t done = 0; done < count; done += each) {
        Uints r[kLanes];
        if (lanes == kLanes && there - done >= each) {
            load_transposed(from + done, stride * int64_t(sizeof(T)), r);
        } else {
            for (int l = 0; l < kLanes; ++l) r[l] = l < lanes ? row_words(from + l * stride + done, there - done) : Uints{};
            transpose(r);
        }
        NM_UNROLL_16 for (int i = 0; i < kLanes; ++i) store_widened(r[i], x + (done + i * per) * kLanes, T{});
    }
}

}  // namespace
}  // namespace nm
