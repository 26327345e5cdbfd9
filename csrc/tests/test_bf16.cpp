// The bf16 GEMMs from expanded tiles against sums in double, under every instruction set.
#include <cmath>

#include "../core/bitpack.h"
#include "check.h"

using namespace nm_test;

namespace {

constexpr int kBf16 = nm::kBFloat16;

struct Weight {
    Buffer dense, values, indices;
};

// `cols` may end inside the last group; what is stored past the end is NaN.
Weight compressed(NM p, int64_t rows, int64_t cols) {
    const int64_t groups = (cols + p.m - 1) / p.m, kept = groups * p.n, bytes = nm::index_bytes(kept, nm::index_bits(p.m));
    Weight w{Buffer(rows * cols, 2), Buffer(rows * kept, 2), Buffer(rows * bytes, 1)};
    const Buffer whole = numbers(rows * groups * p.m, kBf16, 8, false);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = cols; c < groups * p.m; ++c) std::memcpy(whole.as<char>() + 2 * (r * groups * p.m + c), "\xc0\x7f", 2);
    }
    nm::kernels().compress(whole.data(), kBf16, rows, groups * p.m, p.n, p.m, nullptr, w.values.data(), w.indices.as<uint8_t>(), 1);
    nm::kernels().decompress(w.values.data(), w.indices.as<uint8_t>(), kBf16, rows, cols, p.n, p.m, w.dense.data(), 1);
    return w;
}

// c [outputs, tokens] = w b with w(o, k), b(k, t) as doubles and c(o, t) as computed
template <class W, class B, class C>
bool agree(int64_t outputs, int64_t depth, int64_t tokens, const W& w, const B& b, const Buffer& bias, bool biased, const C& c) {
    for (int64_t o = 0; o < outputs; ++o) {
        for (int64_t t = 0; t < tokens; ++t) {
            double sum = biased ? number(bias, kBf16, o) : 0.0, size = std::fabs(sum);
            for (int64_t k = 0; k < depth; ++k) {
                sum += w(o, k) * b(k, t);
                size += std::fabs(w(o, k) * b(k, t));
            }
            if (!(std::fabs(c(o, t) - sum) <= 4e-3 * std::fabs(sum) + 1e-5 * size)) return false;
        }
    }
    return true;
}

void every_gemm(NM p, int64_t rows, int64_t cols, int64_t tokens, int threads) {
    const Weight w = compressed(p, rows, cols);
    const Buffer x = numbers(tokens * cols, kBf16, 9, false), g = numbers(tokens * rows, kBf16, 10, false);
    const Buffer bias = numbers(rows, kBf16, 11, false);
    const auto weight = [&](int64_t r, int64_t c) { return number(w.dense, kBf16, r * cols + c); };
    const std::string where = label(p, kBf16, nm::isa()) + " " + std::to_string(rows) + "x" + std::to_string(cols) + "x" + std::to_string(tokens);
    const auto indices = w.indices.as<uint8_t>();
    for (const bool by_token : {true, false}) {  // whether a token's numbers are neighbours, or the tokens' of one number
        using Strides = std::pair<int64_t, int64_t>;
        const auto strides = [&](int64_t size) { return by_token ? Strides{1, size} : Strides{tokens, 1}; };
        const auto in = strides(cols), out = strides(rows);
        const auto at = [&](const Buffer& of, Strides stride) {
            return [&of, stride](int64_t i, int64_t t) { return number(of, kBf16, i * stride.first + t * stride.second); };
        };
        for (const bool biased : {false, true}) {
            if (biased && !by_token) continue;
            Buffer y(tokens * rows, 2);
            const nm::SpmmCall call{w.values.data(), indices, x.data(), in.first, in.second, biased ? bias.data() : nullptr,
                                    y.data(), out.first, out.second, rows, cols, tokens};
            CHECK(nm::kernels().bf16_spmm(call, p.n, p.m, threads)) << where;
            CHECK(agree(rows, cols, tokens, weight, at(x, in), bias, biased, at(y, out))) << where << (by_token ? " fprop" : " wgrad");
        }
        Buffer dx(tokens * cols, 2);
        const nm::SpmmCall call{w.values.data(), indices, g.data(), out.first, out.second, nullptr,
                                dx.data(), in.first, in.second, rows, cols, tokens};
        CHECK(nm::kernels().bf16_spmm_transposed(call, p.n, p.m, threads)) << where;
        const auto transposed = [&](int64_t c, int64_t r) { return weight(r, c); };
        CHECK(agree(cols, rows, tokens, transposed, at(g, out), bias, false, at(dx, in))) << where << " dgrad";
    }
}

TEST(bf16_gemms) {
    each_isa([](const std::string&) {
        for (NM p : {NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{4, 8}, NM{4, 4}, NM{1, 16}, NM{3, 5}, NM{5, 48}, NM{7, 256}}) {
            for (int64_t cols : {int64_t(p.m), int64_t(5 * p.m - 1), int64_t((1056 + p.m - 1) / p.m * p.m + 1)}) {
                for (int64_t tokens : {0, 1, 2, 8, 17}) every_gemm(p, 35, cols, tokens, 2);
            }
            every_gemm(p, 1, 2 * p.m, 40, 1);
        }
    });
}

TEST(bf16_gemms_of_several_blocks) {
    each_isa([](const std::string&) {
        every_gemm({2, 4}, 33, 1100, 33, 2);
        every_gemm({2, 4}, 530, 44, 65, 1);
        every_gemm({1, 8}, 40, 40, 530, 3);
        every_gemm({1, 4}, 70, 1100, 300, 2);
        every_gemm({2, 8}, 34, 1100, 50, 1);
        every_gemm({1, 8}, 75, 2100, 20, 2);
    });
}

// A group may store its weights in any order: no writer of ours does that, but a file may.
TEST(bf16_gemms_of_indices_out_of_order) {
    each_isa([](const std::string&) {
        const int64_t rows = 5, cols = 40, tokens = 20;
        const Weight w = compressed({2, 4}, rows, cols);
        const auto values = w.values.as<uint16_t>();
        const auto indices = w.indices.as<uint8_t>();
        for (int64_t group = 0; group < rows * cols / 4; group += 7) {
            uint8_t& byte = indices[group / 2];
            const int shift = int(group % 2 * 4), pair = byte >> shift & 15;
            byte = uint8_t((byte & ~(15 << shift)) | ((pair >> 2 | (pair & 3) << 2) << shift));
            std::swap(values[2 * group], values[2 * group + 1]);
        }
        const Buffer x = numbers(tokens * cols, kBf16, 9, false), bias = numbers(rows, kBf16, 11, false);
        Buffer y(tokens * rows, 2);
        const nm::SpmmCall call{w.values.data(), indices, x.data(), 1, cols, bias.data(), y.data(), 1, rows, rows, cols, tokens};
        CHECK(nm::kernels().bf16_spmm(call, 2, 4, 1));
        const auto weight = [&](int64_t r, int64_t c) { return number(w.dense, kBf16, r * cols + c); };
        const auto inputs = [&](int64_t c, int64_t t) { return number(x, kBf16, t * cols + c); };
        const auto results = [&](int64_t r, int64_t t) { return number(y, kBf16, t * rows + r); };
        CHECK(agree(rows, cols, tokens, weight, inputs, bias, true, results));
    });
}

TEST(bf16_gemms_of_damaged_indices) {
    each_isa([](const std::string&) {
        for (NM p : {NM{1, 8}, NM{2, 8}, NM{4, 8}, NM{3, 5}, NM{3, 32}}) {
            for (const auto& [groups, tokens] : {std::pair<int64_t, int64_t>{1, 4}, {64, 4}, {65, 4}, {131, 4}, {131, 20}}) {
                const int64_t rows = 3, cols = groups * p.m;
                const Weight w = compressed(p, rows, cols);
                w.indices.as<uint8_t>()[w.indices.bytes() - 1] = 0xff;
                Buffer x = numbers(tokens * cols, kBf16, 9, false), y(tokens * rows, 2);
                const auto indices = w.indices.as<uint8_t>();
                const nm::SpmmCall call{w.values.data(), indices, x.data(), 1, cols, nullptr, y.data(), 1, rows, rows, cols, tokens};
                CHECK(!nm::kernels().bf16_spmm(call, p.n, p.m, 1)) << label(p, kBf16, nm::isa());
                const nm::SpmmCall transposed{w.values.data(), indices, y.data(), 1, rows, nullptr, x.data(), 1, cols, rows, cols, tokens};
                CHECK(!nm::kernels().bf16_spmm_transposed(transposed, p.n, p.m, 1)) << label(p, kBf16, nm::isa());
            }
        }
    });
}

}  // namespace
