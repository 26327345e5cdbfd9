// mvue, mvue_compress: the last dimension, a middle one, tails, both methods.
#include "../../core/bitpack.h"
#include "../../core/mvue.h"
#include "../../core/philox.h"
#include "emulated.h"

using namespace nm_test;

namespace {

struct Around {
    int64_t outer, length, inner;
};

// Group by group as core/mvue.h has it. g and dense are [outer, length, inner], the packed rows [outer, inner].
void by_loops(const Buffer& g, int dtype, Around a, NM p, bool approx, const int64_t* seed, Buffer& dense, Buffer& values, Buffer& indices) {
    const int64_t per_row = (a.length + p.m - 1) / p.m;
    const int bits = nm::index_bits(p.m);
    const int64_t row_bytes = nm::index_bytes(per_row * p.n, bits);
    std::memset(indices.data(), 0, indices.bytes());
    nm::by_dtype(dtype, [&](auto tag) {
        using T = decltype(tag);
        for (int64_t j = 0; j < a.outer * a.inner * per_row; ++j) {
            const int64_t row = j / per_row, first = j % per_row * p.m, corner = row / a.inner * a.length * a.inner + row % a.inner;
            T x[nm::kMaxM] = {}, stored[nm::kMaxM], result[nm::kMaxM];
            uint8_t keep[nm::kMaxM], places[nm::kMaxM];
            nm::Group<nm::kMaxM> group;
            for (int i = 0; i < p.m; ++i) {
                if (first + i < a.length) x[i] = g.as<T>()[corner + (first + i) * a.inner];
                group.a[i] = nm::magnitude(nm::to_float(x[i]));
            }
            const nm::Words words = nm::philox_block(uint64_t(seed[0]), uint64_t(seed[1]), uint64_t(approx ? j : j >> 2));
            approx ? group.approx(p.m, words.w[0] >> 8, words.w[1] >> 8) : group.exact<T>(p.n, p.m, words.w[j & 3]);
            for (int i = 0; i < p.m; ++i) {
                result[i] = group.result<T>(i, x[i]);
                keep[i] = !nm::is_zero(result[i]);
                if (first + i < a.length) dense.as<T>()[corner + (first + i) * a.inner] = result[i];
            }
            nm::compact_group(result, keep, p.n, p.m, stored, places);
            for (int k = 0; k < p.n; ++k) {
                values.as<T>()[j * p.n + k] = stored[k];
                nm::put_index(indices.as<uint8_t>() + row * row_bytes, j % per_row * p.n + k, bits, places[k]);
            }
        }
    });
}

void agree(NM p, int dtype, Around a, bool approx, bool wide) {
    const int size = size_of(dtype);
    const int64_t numel = a.outer * a.length * a.inner, rows = a.outer * a.inner, per_row = (a.length + p.m - 1) / p.m;
    const int64_t slots = rows * per_row * p.n, bytes = rows * nm::index_bytes(per_row * p.n, nm::index_bits(p.m));
    const int64_t seed[2] = {0x123456789abcdef, int64_t(1) << 33};
    const Buffer g = placed(numbers(numel, dtype, uint64_t(numel + p.n), wide), wide, size);
    Buffer dense = place(numel, size, wide), values = place(slots, size, wide), indices = place(bytes, 1, wide);
    Buffer want_dense(numel, size), want_values(slots, size), want_indices(bytes, 1);
    by_loops(g, dtype, a, p, approx, seed, want_dense, want_values, want_indices);
    nm::cuda::mvue(g.data(), dtype, a.outer, a.length, a.inner, p.n, p.m, seed, approx, dense.data(), kQueue);
    nm::cuda::mvue_compress(g.data(), dtype, a.outer, a.length, a.inner, p.n, p.m, seed, approx, values.data(), indices.as<uint8_t>(), false, kQueue);
    const std::string what = label(p, dtype, wide ? "wide " : "") + (approx ? "approx " : "") + std::to_string(a.outer) + "x" + std::to_string(a.length) + "x" +
                             std::to_string(a.inner);
    CHECK(same_numbers(dense, want_dense, dtype)) << "mvue " << what;
    CHECK(same_numbers(values, want_values, dtype)) << "values " << what;
    CHECK(indices == want_indices) << "indices " << what;
}

TEST(emulated_mvue_agrees_with_loops) {
    for (NM p : {NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{1, 16}, NM{1, 1}, NM{3, 4}, NM{3, 5}, NM{2, 16}, NM{5, 48}, NM{100, 256}}) {
        for (int dtype : kDtypes) {
            for (Around a : {Around{1, p.m, 1}, Around{3, 5 * p.m, 1}, Around{5, 3 * p.m + 1, 1}, Around{1, 8 * p.m, 1}, Around{1, 3 * p.m, 17}, Around{2, 2 * p.m + 1, 70},
                             Around{1, 1, 65}, Around{1, 131, 64}}) {
                if (p.m > 100 && a.inner > 17) continue;
                for (bool wide : {false, true}) agree(p, dtype, a, false, wide);
                if (p.n == 2) agree(p, dtype, a, true, true);
            }
        }
    }
}

}  // namespace
