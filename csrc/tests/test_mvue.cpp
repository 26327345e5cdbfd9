// mvue and mvue_compress along the last and a middle dimension, with tails: the same bits under every instruction set.
#include "../core/bitpack.h"
#include "check.h"

using namespace nm_test;

namespace {

struct Around {
    int64_t outer, length, inner;
};

void agree(NM p, int dtype, Around a, bool nasty, bool approx) {
    const Buffer g = numbers(a.outer * a.length * a.inner, dtype, uint64_t(a.length), nasty);
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
    for (NM p : {NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{4, 8}, NM{1, 16}, NM{1, 32}, NM{3, 5}, NM{5, 48}}) {
        for (int dtype : kDtypes) {
            for (Around a : {Around{1, p.m, 1}, Around{3, 5 * p.m + 1, 1}, Around{17, 3 * p.m, 1}, Around{1, 33 * p.m, 1}, Around{1, 3 * p.m, 17},
                             Around{2, 2 * p.m + 1, 70}, Around{1, 1, 129}}) {
                for (bool nasty : {false, true}) {
                    agree(p, dtype, a, nasty, false);
                    if (p.n == 2) agree(p, dtype, a, nasty, true);
                }
            }
        }
    }
}

}  // namespace
