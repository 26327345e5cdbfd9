// mvue and mvue_compress along any dimension: g is [outer, length, inner], contiguous, and groups run along `length`.
// After moving that dimension last there are outer*inner rows; group j = row * groups_per_row + group.
#include "../../core/mvue.h"

#include <algorithm>
#include <cstring>

#include "../../core/bitpack.h"
#include "../../core/philox.h"
#include "../kernels.h"

namespace nm {
namespace {

constexpr int64_t kColumns = 64;  // neighbouring rows done together, so that a strided read uses whole cache lines

// Uniforms of group j. The exact method packs four groups into one Philox block; the last block is remembered.
class Uniforms {
  public:
    explicit Uniforms(const MvueCall& call) : call_(call) {}

    uint32_t one(int64_t j) {
        if (const int64_t block = j >> 2; block != block_) {
            words_ = philox_block(call_.seed, call_.offset, uint64_t(block));
            block_ = block;
        }
        return words_.w[j & 3] >> 8;
    }

    void two(int64_t j, uint32_t& u0, uint32_t& u1) const {
        const Words words = philox_block(call_.seed, call_.offset, uint64_t(j));
        u0 = words.w[0] >> 8;
        u1 = words.w[1] >> 8;
    }

  private:
    const MvueCall& call_;
    int64_t block_ = -1;
    Words words_{};
};

// Walks over all groups; done(row, group, x) receives the estimate x[m] of each, zero-padded at the tail.
template <class T, class P, class F>
void each_group(const MvueCall& call, P p, int threads, const F& done) {
    const T* g = static_cast<const T*>(call.g);
    const int64_t groups = (call.length + p.m - 1) / p.m, blocks = (call.inner + kColumns - 1) / kColumns;
    parallel_ranges(call.outer * blocks, call.length * std::min(kColumns, call.inner), threads, [&](int64_t begin, int64_t end) {
        Uniforms uniforms(call);
        Group<P::capacity> work;
        T in[P::capacity], x[P::capacity];
        for (int64_t task = begin; task < end; ++task) {
            const int64_t outer = task / blocks, first = task % blocks * kColumns, last = std::min(first + kColumns, call.inner);
            for (int64_t group = 0; group < groups; ++group) {
                const int64_t there = std::min<int64_t>(p.m, call.length - group * p.m);
                for (int64_t column = first; column < last; ++column) {
                    const T* from = g + (outer * call.length + group * p.m) * call.inner + column;
                    for (int64_t i = 0; i < p.m; ++i) {
                        in[i] = i < there ? from[i * call.inner] : T{};
                        work.a[i] = magnitude(to_float(in[i]));
                    }
                    const int64_t row = outer * call.inner + column, j = row * groups + group;
                    if (call.approx) {
                        uint32_t u0, u1;
                        uniforms.two(j, u0, u1);
                        work.approx(p.m, u0, u1);
                    } else {
                        work.exact(p.n, p.m, uniforms.one(j));
                    }
                    for (int i = 0; i < p.m; ++i) x[i] = work.result(i, in[i]);
                    done(row, group, x);
                }
            }
        }
    });
}

void check_method(const MvueCall& call, int n) {
    if (call.approx && n != 2) throw std::invalid_argument("the approximate sampler draws two elements, so n must be 2");
}

}  // namespace

namespace NM_ISA {

void mvue(const MvueCall& call, int dtype, int n, int m, void* out, int threads) {
    check_method(call, n);
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        each_group<T>(call, p, threads, [&](int64_t row, int64_t group, const T* x) {
            const int64_t outer = row / call.inner, column = row % call.inner;
            const int64_t there = std::min<int64_t>(p.m, call.length - group * p.m);
            T* to = static_cast<T*>(out) + (outer * call.length + group * p.m) * call.inner + column;
            for (int64_t i = 0; i < there; ++i) to[i * call.inner] = x[i];
        });
    });
}

void mvue_compress(const MvueCall& call, int dtype, int n, int m, void* values, uint8_t* indices, int threads) {
    check_method(call, n);
    by_dtype_and_pattern(dtype, n, m, [&](auto element, auto p) {
        using T = decltype(element);
        using P = decltype(p);
        const int bits = index_bits(p.m);
        const int64_t kept = (call.length + p.m - 1) / p.m * p.n, bytes = index_bytes(kept, bits);
        each_group<T>(call, p, threads, [&](int64_t row, int64_t group, const T* x) {
            uint8_t keep[P::capacity], positions[P::capacity] = {};
            T stored[P::capacity] = {};
            uint8_t* packed = indices + row * bytes;
            if (group == 0) std::memset(packed, 0, size_t(bytes));
            for (int i = 0; i < p.m; ++i) keep[i] = !is_zero(x[i]);
            compact_group(x, keep, p.n, p.m, stored, positions);
            for (int k = 0; k < p.n; ++k) {
                static_cast<T*>(values)[row * kept + group * p.n + k] = stored[k];
                put_index(packed, group * p.n + k, bits, positions[k]);
            }
        });
    });
}

}  // namespace NM_ISA
}  // namespace nm
