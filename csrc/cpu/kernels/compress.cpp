// compress and decompress. Spans of whole groups end on a byte of the packed indices, so they are the unit of work; rows
// matter only where their own last byte has spare bits.
#include <atomic>
#include <cstring>

#include "../../core/bitpack.h"
#include "../kernels.h"
#include "../stream.h"
#include "packer.h"

namespace nm {
namespace {

// A matrix and its packed form. Where packed rows need no spare bits, all rows are one long row.
struct Sizes {
    int n, m, bits;
    int64_t rows, cols, kept, bytes, span;

    Sizes(int64_t row_count, int64_t col_count, int n_, int m_) : n(n_), m(m_), bits(index_bits(m_)), rows(row_count), cols(col_count) {
        check_pattern(n, m);
        if (cols % m == 0 && cols / m * n * bits % 8 == 0) {
            cols *= rows;
            rows = rows > 0;
        }
        kept = (cols + m - 1) / m * n;
        bytes = index_bytes(kept, bits);
        span = span_of(m);
    }

    // make()(first element, elements, packed elements before, bytes before) for all spans; make() is called for each range of them.
    template <class Make>
    void each(int threads, const Make& make) const {
        const int64_t spans = (cols + span - 1) / span;
        parallel_ranges(rows * spans, std::max<int64_t>(1, std::min(span, cols) / 4), threads, [&](int64_t first, int64_t last) {
            auto&& work = make();
            for (int64_t i = first; i < last; ++i) {
                const int64_t row = i / spans, at = i % spans * span, before = at / m * n;
                work(row * cols + at, std::min(span, cols - at), row * kept + before, row * bytes + before * bits / 8);
            }
            stream_fence();
        });
    }
};

// Puts packed elements back, span by span.
template <class T>
struct Unpacker {
    const Sizes& sizes;
    const Positions& words;
    T buffer[kMaxSpan];
    uint8_t positions[kMaxSpan + kSlack];

    Unpacker(const Sizes& s, const Positions& w) : sizes(s), words(w) {}

    // Group by group, in any order of indices. False: one is not below m.
    bool scatter(const T* values, const uint8_t* where, int64_t count, T* out) const {
        std::memset(static_cast<void*>(out), 0, size_t(count) * sizeof(T));
        for (int64_t g = 0; g < count; g += sizes.m, values += sizes.n, where += sizes.n) {
            for (int k = 0; k < sizes.n; ++k) {
                if (where[k] >= sizes.m) return false;
                if (g + where[k] < count) out[g + where[k]] = values[k];
            }
        }
        return true;
    }

    // `after`: how many values may be read beyond those of the span
    bool unpack(const T* values, const uint8_t* packed, int64_t count, int64_t after, T* out) {
        const int64_t stored = (count + sizes.m - 1) / sizes.m * sizes.n;
        unpack_positions(packed, stored, sizes.bits, positions);
        int64_t word = 0;
        if (64 % sizes.m == 0) {
            const int64_t each = 64 / sizes.m * sizes.n, words_safe = std::min(count / 64, (stored + after - kSlack) / each);
            uint64_t bits;
            for (; word < words_safe && words.bits(positions + word * each, bits); ++word) {
                prefetch64(values);
                values = scatter64(values, bits, out + 64 * word);
            }
            return scatter(values, positions + word * each, count - 64 * word, out + 64 * word);
        }
        return scatter(values, positions, count, out);
    }
};

}  // namespace

namespace NM_ISA {

bool compress(const void* w, int dtype, int64_t rows, int64_t cols, int n, int m, const uint8_t* mask, void* values, uint8_t* indices,
              int threads) {
    std::atomic<bool> fits{true};
    const Sizes sizes(rows, cols, n, m);
    const Ring ring(m);
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const bool streamed = sizes.rows * sizes.kept * int64_t(sizeof(T)) >= kStreamBytes;
        sizes.each(threads, [&] {
            return [&, packer = Packer<T>(n, m, select_fn<T>(n, m), ring)](int64_t at, int64_t count, int64_t value, int64_t byte) mutable {
                const T* from = static_cast<const T*>(w) + at;
                if (!packer.choose(from, mask ? mask + at : nullptr, count)) {
                    fits = false;
                    return;
                }
                const int64_t stored = packer.pack(from, count, mask != nullptr);
                put(static_cast<T*>(values) + value, packer.values, stored * int64_t(sizeof(T)), streamed);
                put(indices + byte, packer.packed, index_bytes(stored, sizes.bits), streamed);
            };
        });
    });
    return fits;
}

bool decompress(const void* values, const uint8_t* indices, int dtype, int64_t rows, int64_t cols, int n, int m, void* out, int threads) {
    std::atomic<bool> valid{true};
    const Sizes sizes(rows, cols, n, m);
    const Positions words(n, m);
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const bool streamed = sizes.rows * sizes.cols * int64_t(sizeof(T)) >= kStreamBytes;
        const int64_t total = sizes.rows * sizes.kept;
        sizes.each(threads, [&] {
            return [&, unpacker = Unpacker<T>(sizes, words)](int64_t at, int64_t count, int64_t value, int64_t byte) mutable {
                const int64_t after = total - value - (count + m - 1) / m * n;
                T* to = static_cast<T*>(out) + at;
                if (!unpacker.unpack(static_cast<const T*>(values) + value, indices + byte, count, after, streamed ? unpacker.buffer : to)) {
                    valid = false;
                } else if (streamed) {
                    stream(to, unpacker.buffer, count * int64_t(sizeof(T)));
                }
            };
        });
    });
    return valid;
}

}  // namespace NM_ISA
}  // namespace nm
