// Values as integers: rounding and decoding give the same bits under every instruction set, and products are those of the decoded weight
// in double.
#include <cmath>

#include "../core/bitpack.h"
#include "check.h"

using namespace nm_test;

namespace {

struct Rounded {
    Buffer values, step;
};

int64_t stored(int64_t kept, int bits) { return bits == 8 ? kept : (kept + 1) / 2; }

Rounded rounded(const Buffer& w, int dtype, int64_t rows, int64_t kept, int64_t steps, int bits, int threads) {
    Rounded r{Buffer(rows * stored(kept, bits), 1), Buffer(rows * steps, 2)};
    nm::kernels().quantize_values(w.data(), dtype, rows, kept, steps, bits, r.values.data(), r.step.as<nm::bf16>(), threads);
    return r;
}

nm::Integers integers(const Rounded& r, int64_t rows, int64_t kept, int64_t steps, int bits) {
    return {r.values.data(), r.step.as<nm::bf16>(), rows, kept, steps, bits};
}

TEST(rounding_and_decoding_agree) {
    struct Shape {
        int64_t rows, kept, steps;
    };
    for (int bits : {8, 4}) {
        for (int dtype : kDtypes) {
            for (Shape s : {Shape{0, 8, 2}, {1, 1, 1}, {3, 15, 1}, {5, 15, 3}, {17, 64, 4}, {3, 200, 8}}) {
                for (bool edge_cases : {false, true}) {
                    const Buffer w = numbers(s.rows * s.kept, dtype, uint64_t(s.kept), edge_cases);
                    std::vector<Rounded> expected;
                    std::vector<Buffer> floats;
                    each_isa([&](const std::string& isa) {
                        for (int threads : {1, 3}) {
                            Rounded got = rounded(w, dtype, s.rows, s.kept, s.steps, bits, threads);
                            Buffer back(s.rows * s.kept, size_of(dtype));
                            nm::kernels().dequantize_values(integers(got, s.rows, s.kept, s.steps, bits), dtype, back.data(), threads);
                            if (expected.empty()) {
                                expected.push_back(std::move(got));
                                floats.push_back(std::move(back));
                                continue;
                            }
                            CHECK(got.values == expected[0].values && got.step == expected[0].step) << bits << " bits, " << s.kept << " " << isa;
                            CHECK(same_numbers(back, floats[0], dtype)) << bits << " bits, " << s.kept << " " << isa;
                        }
                    });
                }
            }
        }
    }
}

void one_product(NM p, int dtype, int bits, int64_t tokens, int64_t rows, int64_t cols, int64_t steps) {
    const int64_t groups = (cols + p.m - 1) / p.m, kept = groups * p.n, bytes = nm::index_bytes(kept, nm::index_bits(p.m));
    const Buffer whole = numbers(rows * groups * p.m, nm::kFloat32, 7, false), x = numbers(tokens * cols, dtype, 9, false);
    const Buffer bias = numbers(rows, dtype, 10, false);
    Buffer floats(rows * kept, 4), indices(rows * bytes, 1), dense(rows * cols, 4);
    nm::kernels().compress(whole.data(), nm::kFloat32, rows, groups * p.m, p.n, p.m, nullptr, floats.data(), indices.as<uint8_t>(), 1);
    const Rounded r = rounded(floats, nm::kFloat32, rows, kept, steps, bits, 1);
    const nm::Integers weight = integers(r, rows, kept, steps, bits);
    nm::kernels().dequantize_values(weight, nm::kFloat32, floats.data(), 1);
    nm::kernels().decompress(floats.data(), indices.as<uint8_t>(), nm::kFloat32, rows, cols, p.n, p.m, dense.data(), 1);
    Buffer y(tokens * rows, size_of(dtype));
    const nm::IntegersLinearCall call{x.data(), weight, p.m == 1 ? nullptr : indices.as<uint8_t>(), bias.data(), y.data(), cols, tokens, dtype, dtype};
    CHECK(nm::kernels().linear_integers(call, p.n, p.m, 2)) << label(p, dtype, nm::isa());
    const double tolerance = dtype == nm::kFloat32 ? 2e-5 : dtype == nm::kBFloat16 ? 2e-2 : 3e-3;
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t row = 0; row < rows; ++row) {
            double sum = number(bias, dtype, row), size = std::fabs(sum);
            for (int64_t c = 0; c < cols; ++c) {
                const double term = number(x, dtype, t * cols + c) * number(dense, nm::kFloat32, row * cols + c);
                sum += term;
                size += std::fabs(term);
            }
            CHECK(std::fabs(number(y, dtype, t * rows + row) - sum) <= tolerance * (size + 1e-3))
                << label(p, dtype, nm::isa()) << " " << bits << " bits, " << tokens << "x" << rows << "x" << cols << ", " << steps << " steps";
        }
    }
}

TEST(products_of_integers) {
    each_isa([](const std::string&) {
        for (NM p : {NM{1, 1}, NM{2, 4}, NM{1, 4}, NM{1, 8}, NM{2, 8}, NM{4, 8}, NM{3, 5}}) {
            for (int dtype : kDtypes) {
                for (int bits : {8, 4}) {
                    for (int64_t tokens : {1, 2, 3, 7, 16}) {
                        for (int64_t rows : {1, 35}) {
                            for (int64_t cols : {int64_t(p.m), int64_t(33 * p.m + 1)}) one_product(p, dtype, bits, tokens, rows, cols, 1);
                            if (128 % p.m == 0) one_product(p, dtype, bits, tokens, rows, 640, 5);
                        }
                    }
                }
            }
        }
    });
}

}  // namespace
