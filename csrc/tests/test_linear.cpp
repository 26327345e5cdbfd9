// Products from the compressed form against sums in double, under every instruction set.
#include <cmath>

#include "../core/bitpack.h"
#include "check.h"

using namespace nm_test;

namespace {

double tolerance(int dtype) { return dtype == nm::kFloat32 ? 2e-5 : dtype == nm::kBFloat16 ? 2e-2 : 3e-3; }

struct Weight {
    Buffer dense, values, indices;
};

// `cols` may end inside the last group.
Weight compressed(NM p, int dtype, int64_t rows, int64_t cols) {
    const int64_t groups = (cols + p.m - 1) / p.m, kept = groups * p.n, bytes = nm::index_bytes(kept, nm::index_bits(p.m));
    Weight w{numbers(rows * cols, dtype, 7, false), Buffer(rows * kept, size_of(dtype)), Buffer(rows * bytes, 1)};
    const Buffer whole = numbers(rows * groups * p.m, dtype, 8, false);
    nm::kernels().compress(whole.data(), dtype, rows, groups * p.m, p.n, p.m, nullptr, w.values.data(), w.indices.as<uint8_t>(), 1);
    nm::kernels().decompress(w.values.data(), w.indices.as<uint8_t>(), dtype, rows, cols, p.n, p.m, w.dense.data(), 1);
    return w;
}

void one_product(NM p, int dtype, int64_t tokens, int64_t rows, int64_t cols) {
    const Weight w = compressed(p, dtype, rows, cols);
    const Buffer x = numbers(tokens * cols, dtype, 9, false), bias = numbers(rows, dtype, 10, false);
    for (const bool biased : {false, true}) {
        Buffer y(tokens * rows, size_of(dtype));
        const nm::LinearCall call{x.data(), w.values.data(), w.indices.as<uint8_t>(), biased ? bias.data() : nullptr, y.data(), rows, cols};
        CHECK(nm::kernels().linear(call, tokens, dtype, p.n, p.m, 2)) << label(p, dtype, nm::isa());
        for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t r = 0; r < rows; ++r) {
                double sum = biased ? number(bias, dtype, r) : 0.0, size = std::fabs(sum);
                for (int64_t c = 0; c < cols; ++c) {
                    const double term = number(x, dtype, t * cols + c) * number(w.dense, dtype, r * cols + c);
                    sum += term;
                    size += std::fabs(term);
                }
                CHECK(std::fabs(number(y, dtype, t * rows + r) - sum) <= tolerance(dtype) * (size + 1e-3))
                    << label(p, dtype, nm::isa()) << " " << tokens << "x" << rows << "x" << cols << " at " << t << ", " << r;
            }
        }
    }
}

TEST(products_of_few_tokens) {
    each_isa([](const std::string&) {
        for (NM p : {NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{4, 8}, NM{1, 16}, NM{1, 32}, NM{3, 5}, NM{5, 48}}) {
            for (int dtype : kDtypes) {
                for (int64_t tokens : {0, 1, 2, 3, 5, 8, 16}) {
                    for (int64_t rows : {1, 3, 17}) {
                        for (int64_t cols : {int64_t(p.m), int64_t(33 * p.m), int64_t(33 * p.m + 1)}) one_product(p, dtype, tokens, rows, cols);
                    }
                }
            }
        }
    });
}

}  // namespace
