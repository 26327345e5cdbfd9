// mvue and mvue_compress along the last and a middle dimension, with tails: the same bits under every instruction set.
#include <algorithm>
#include <cstdlib>

#include "../core/bitpack.h"
#include "../cpu/stream.h"
#include "check.h"

using namespace nm_test;

namespace {

struct Around {
    int64_t outer, length, inner;
};

void agree(NM p, int dtype, Around a, bool edge_cases, bool approx) {
    const Buffer g = numbers(a.outer * a.length * a.inner, dtype, uint64_t(a.length), edge_cases);
    const int64_t rows = a.outer * a.inner, kept = (a.length + p.m - 1) / p.m * p.n, bytes = nm::index_bytes(kept, nm::index_bits(p.m));
    const nm::MvueCall call{g.data(), a.outer, a.length, a.inner, 0x123456789abcdefull, 1ull << 33, approx};
    std::vector<Buffer> expected;
    each_isa([&](const std::string& isa) {
        for (int threads : {1, 3}) {
            std::vector<Buffer> out;
            out.emplace_back(a.outer * a.length * a.inner, size_of(dtype));
            out.emplace_back(rows * kept, size_of(dtype));
            out.emplace_back(rows * bytes, 1);
            nm::kernels().mvue(call, dtype, p.n, p.m, out[0].data(), threads);
            nm::kernels().mvue_compress(call, dtype, p.n, p.m, out[1].data(), out[2].as<uint8_t>(), threads);
            if (expected.empty()) expected = std::move(out);
            for (size_t i = 0; i < out.size(); ++i) {
                if (out[i].bytes() == 0) continue;
                CHECK(out[i] == expected[i]) << label(p, dtype, isa) << ", output " << i << ", " << a.outer << "x" << a.length << "x" << a.inner;
            }
        }
    });
}

TEST(estimates_agree) {
    for (NM p : {NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{4, 8}, NM{1, 16}, NM{2, 16}, NM{1, 32}, NM{3, 5}, NM{5, 48}}) {
        for (int dtype : kDtypes) {
            for (Around a : {Around{1, p.m, 1}, Around{3, 5 * p.m + 1, 1}, Around{17, 3 * p.m, 1}, Around{1, 33 * p.m, 1}, Around{1, 3 * p.m, 17},
                             Around{2, 2 * p.m + 1, 70}, Around{1, 1, 129}}) {
                for (bool edge_cases : {false, true}) {
                    agree(p, dtype, a, edge_cases, false);
                    if (p.n == 2) agree(p, dtype, a, edge_cases, true);
                }
            }
        }
    }
}

// An output on a line boundary, which streaming stores need.
struct Aligned {
    explicit Aligned(int64_t count) : bytes(size_t(count)), data(static_cast<char*>(std::aligned_alloc(64, size_t(count + 63) / 64 * 64))) {}
    bool operator==(const Aligned& other) const { return bytes == other.bytes && std::memcmp(data.get(), other.data.get(), bytes) == 0; }

    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    size_t bytes;
    std::unique_ptr<char, Free> data;
};

// Whole lines of outputs larger than the caches leave another way.
TEST(streamed_estimates_agree) {
    const Buffer some = numbers(9973, nm::kFloat32, 5, false);
    for (Around a : {Around{4096, 2048, 1}, Around{1, 2048, 4096}}) {
        const int64_t elements = a.outer * a.length * a.inner;
        Buffer g(elements, 4);
        for (size_t at = 0; at < g.bytes(); at += some.bytes()) std::memcpy(g.as<char>() + at, some.data(), std::min(some.bytes(), g.bytes() - at));
        CHECK(elements * 2 >= nm::kStreamBytes) << "not streamed";
        const nm::MvueCall call{g.data(), a.outer, a.length, a.inner, 7, 8, false};
        std::vector<Aligned> expected;
        each_isa([&](const std::string& isa) {
            std::vector<Aligned> out;
            for (int64_t bytes : {elements * 4, elements * 2, elements / 8}) out.emplace_back(bytes);
            nm::kernels().mvue(call, nm::kFloat32, 2, 4, out[0].data.get(), 2);
            nm::kernels().mvue_compress(call, nm::kFloat32, 2, 4, out[1].data.get(), reinterpret_cast<uint8_t*>(out[2].data.get()), 2);
            if (expected.empty()) expected = std::move(out);
            for (size_t i = 0; i < out.size(); ++i) CHECK(out[i] == expected[i]) << isa << ", output " << i << ", inner " << a.inner;
        });
    }
}

}  // namespace
