// compress and decompress: a row is the unit of work, because packed indices of neighbouring groups share bytes.
#include <atomic>
#include <cstring>

#include "../../core/bitpack.h"
#include "../../core/rank.h"
#include "../kernels.h"

namespace nm {
namespace {

template <class T, class P>
bool compress_row(const T* w, const uint8_t* given, int64_t groups, P p, T* values, uint8_t* indices) {
    const int bits = index_bits(p.m);
    std::memset(indices, 0, size_t(index_bytes(groups * p.n, bits)));
    uint8_t keep[P::capacity], positions[P::capacity] = {};
    uint32_t keys[P::capacity];
    T stored[P::capacity] = {};
    for (int64_t g = 0; g < groups; ++g, w += p.m, values += p.n) {
        if (given) {
            int count = 0;
            for (int i = 0; i < p.m; ++i) {
                keep[i] = given[g * p.m + i] != 0;
                count += keep[i];
            }
            if (count > p.n) return false;
        } else {
            for (int i = 0; i < p.m; ++i) keys[i] = Key<T>::of(w[i]);
            mask_group(keys, p.n, p.m, Key<T>::bits, keep);
        }
        compact_group(w, keep, p.n, p.m, stored, positions);
        for (int k = 0; k < p.n; ++k) {
            values[k] = stored[k];
            put_index(indices, g * p.n + k, bits, positions[k]);
        }
    }
    return true;
}

template <class T, class P>
bool decompress_row(const T* values, const uint8_t* indices, int64_t cols, P p, T* out) {
    const int bits = index_bits(p.m);
    std::memset(static_cast<void*>(out), 0, size_t(cols) * sizeof(T));
    const int64_t groups = (cols + p.m - 1) / p.m;
    for (int64_t g = 0; g < groups; ++g) {
        for (int k = 0; k < p.n; ++k) {
            const int position = get_index(indices, g * p.n + k, bits);
            if (position >= p.m) return false;
            if (g * p.m + position < cols) out[g * p.m + position] = values[g * p.n + k];
        }
    }
    return true;
}

}  // namespace

namespace NM_ISA {

bool compress(const void* w, int dtype, int64_t rows, int64_t cols, int n, int m, const uint8_t* given, void* values, uint8_t* indices,
              int threads) {
    std::atomic<bool> fits{true};
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        const int64_t groups = cols / p.m, kept = groups * p.n, bytes = index_bytes(kept, index_bits(p.m));
        parallel_ranges(rows, cols, threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                const uint8_t* row_mask = given ? given + r * cols : nullptr;
                if (!compress_row(static_cast<const T*>(w) + r * cols, row_mask, groups, p, static_cast<T*>(values) + r * kept,
                                  indices + r * bytes)) {
                    fits = false;
                }
            }
        });
    });
    return fits;
}

bool decompress(const void* values, const uint8_t* indices, int dtype, int64_t rows, int64_t cols, int n, int m, void* out, int threads) {
    std::atomic<bool> valid{true};
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        const int64_t kept = (cols + p.m - 1) / p.m * p.n, bytes = index_bytes(kept, index_bits(p.m));
        parallel_ranges(rows, cols, threads, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                if (!decompress_row(static_cast<const T*>(values) + r * kept, indices + r * bytes, cols, p, static_cast<T*>(out) + r * cols)) {
                    valid = false;
                }
            }
        });
    });
    return valid;
}

}  // namespace NM_ISA
}  // namespace nm
