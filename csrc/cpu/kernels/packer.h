// The packed form of a span of whole groups, built in the cache.
#pragma once

#include "../../core/bitpack.h"
#include "patterns.h"
#include "positions.h"
#include "spans.h"

namespace nm {
namespace {

constexpr int64_t kSlack = 64;  // elements that whole-word steps may touch past the end of a buffer

// The packed form of whole words whose groups keep N of M each.
template <class T>
using PackFn = void(const T* w, const uint64_t* bits, int64_t words, T* values, uint8_t* packed);

template <class T, int N, int M>
void pack_words(const T* w, const uint64_t* bits, int64_t words, T* values, uint8_t* packed) {
    static constexpr Codes<N, M> codes;
    for (int64_t i = 0; i < words; ++i) gather_bytes<8 / M * N>(w + 64 * i, bits[i], values + 64 / M * N * i);
    codes.pack(bits, words, packed);
}

// Null where positions are packed one by one.
template <class T>
PackFn<T>* pack_fn(int n, int m) {
    const auto fixed = [](auto N, auto M) -> PackFn<T>* {
        if constexpr (kGatherBytes && Codes<N, M>::kWhole) return pack_words<T, N, M>;
        return nullptr;
    };
    return for_pattern<PackFn<T>>(n, m, fixed, [](auto) -> PackFn<T>* { return nullptr; }, nullptr);
}

// The packed form of one span, built in the cache.
template <class T>
struct Packer {
    const int n, m, bits;
    const Ring& ring;
    SelectFn<T>* const select;
    PackFn<T>* const pack_all;
    uint64_t kept[kMaxSpan / 64], stored[kMaxSpan / 64];
    T values[kMaxSpan + kSlack];
    uint8_t positions[kMaxSpan + kSlack], packed[kMaxSpan];

    Packer(int n_, int m_, SelectFn<T>* s, const Ring& r)
        : n(n_), m(m_), bits(index_bits(m_)), ring(r), select(s), pack_all(pack_fn<T>(n, m)) {}

    // False if the mask keeps too many.
    bool choose(const T* w, const uint8_t* mask, int64_t count) {
        if (mask) {
            bits_of_mask(mask, count, kept);
            return fill_groups(kept, count, n, m, stored);
        }
        select(w, count, n, m, stored);
        return true;
    }

    // To `values` and `packed`; how many are stored.
    int64_t pack(const T* w, int64_t count, bool masked) {
        if (pack_all && !masked && count % 64 == 0) {
            pack_all(w, stored, count / 64, values, packed);
            return count / m * n;
        }
        T *value = values, rest[64];
        uint8_t* position = positions;
        int phase = 0;
        for (int64_t i = 0; 64 * i < count; ++i, phase = ring.next(phase)) {
            const T* from = w + 64 * i;
            if (count - 64 * i < 64) {
                std::memset(static_cast<void*>(rest), 0, sizeof rest);
                std::memcpy(static_cast<void*>(rest), from, size_t(count - 64 * i) * sizeof(T));
                from = rest;
            }
            if (masked && kept[i] != stored[i]) {
                pick64(from, kept[i], rest);
                from = rest;
            }
            value = gather64(from, stored[i], value);
            position = gather64(ring.from(phase), stored[i], position);
        }
        std::memset(position, 0, 8);  // the spare bits
        pack_positions(positions, position - positions, bits, packed);
        return position - positions;
    }
};

}  // namespace
}  // namespace nm
