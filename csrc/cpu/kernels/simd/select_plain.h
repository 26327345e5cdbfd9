// The keys of 64 consecutive elements as an array: the plain form of select_avx512.h and select_avx2.h.
#pragma once

#include "../../../core/types.h"
#include "pack_plain.h"

namespace nm {
namespace {

// Which of 64 elements are kept.
template <class T>
struct Kept64 {
    uint64_t word;

    static Kept64 of(uint64_t bits) { return {bits}; }
    uint64_t bits() const { return word; }
    void flags(uint8_t* out) const { flags_of(word, out); }
    void pick(const T* w, T* out) const { pick64(w, word, out); }
};

template <class T>
struct Keys64 {
    static constexpr int kLanes = 1;     // the largest group that `nth` serves
    static constexpr int kRankable = 8;  // the largest group that `beaten` serves
    static constexpr bool kExact = false;   // two_of_four() is faster than nth()

    int32_t v[64];

    static Keys64 of(const T* w) {
        Keys64 k;
        for (int i = 0; i < 64; ++i) k.v[i] = int32_t(Key<T>::of(w[i]));
        return k;
    }

    // Bit i: the element `By` further on in the group of i, past its end from its start again, ranks above i.
    template <int M, int By>
    uint64_t beaten() const {
        uint64_t bits = 0;
        for (int g = 0; g < 64; g += M) {
            for (int i = 0; i < M; ++i) {
                const int tie = i >= M - By;  // the other has the lower index: it wins ties
                bits |= uint64_t(v[g + (i + By) % M] > v[g + i] - tie) << (g + i);
            }
        }
        return bits;
    }

    // The largest key of each group, in all its places.
    template <int M>
    Keys64 largest() const {
        Keys64 k;
        for (int g = 0; g < 64; g += M) {
            int32_t top = v[g];
            for (int i = 1; i < M; ++i) top = v[g + i] > top ? v[g + i] : top;
            for (int i = 0; i < M; ++i) k.v[g + i] = top;
        }
        return k;
    }

    uint64_t equal(const Keys64& other) const {
        uint64_t bits = 0;
        for (int i = 0; i < 64; ++i) bits |= uint64_t(v[i] == other.v[i]) << i;
        return bits;
    }

    // These elements rank below all others from now on.
    void remove(uint64_t bits) {
        for (int i = 0; i < 64; ++i) v[i] |= -int32_t((bits >> i) & 1);
    }
};

}  // namespace
}  // namespace nm
