// mask, prune, soft_threshold, compress, decompress, transposable: the same bits under every instruction set.
#include "../core/bitpack.h"
#include "check.h"

using namespace nm_test;

namespace {

// What one kernel wrote, per output.
using Outputs = std::vector<Buffer>;

// run() under every instruction set gives what it gives under the portable one; with one thread and with three.
template <class F>
void same_everywhere(NM p, int dtype, const F& run) {
    Outputs expected;
    each_isa([&](const std::string& isa) {
        for (int threads : {1, 3}) {
            Outputs got = run(threads);
            if (expected.empty()) expected = std::move(got);
            for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == expected[i]) << label(p, dtype, isa) << ", output " << i;
        }
    });
}

TEST(group_kernels_agree) {
    each_case([](NM p, int dtype, Size size, bool edge_cases) {
        const int64_t numel = size.rows * size.groups * p.m;
        const Buffer w = numbers(numel, dtype, uint64_t(numel + p.n), edge_cases);
        same_everywhere(p, dtype, [&](int threads) {
            Outputs out;
            for (int bytes : {1, size_of(dtype), size_of(dtype), 4}) out.emplace_back(bytes == 4 && out.size() == 3 ? 1 : numel, bytes);
            nm::kernels().mask(w.data(), dtype, numel, p.n, p.m, out[0].as<uint8_t>(), threads);
            nm::kernels().prune(w.data(), dtype, numel, p.n, p.m, out[1].data(), threads);
            nm::kernels().soft_threshold(w.data(), dtype, numel, p.n, p.m, out[2].data(), threads);
            const float scale = nm::kernels().soft_threshold_scale(w.data(), dtype, numel, p.n, p.m, threads);
            const uint32_t bits = nm::is_nan(scale) ? 0x7fc00000u : nm::float_bits(scale);
            std::memcpy(out[3].data(), &bits, sizeof bits);
            return out;
        });
    });
}

TEST(compressed_forms_agree) {
    each_case([](NM p, int dtype, Size size, bool edge_cases) {
        const int64_t cols = size.groups * p.m, kept = size.groups * p.n, bytes = nm::index_bytes(kept, nm::index_bits(p.m));
        const Buffer w = numbers(size.rows * cols, dtype, uint64_t(cols), edge_cases);
        // a mask that keeps the last of each group, and one more where n allows
        Buffer given(size.rows * cols, 1);
        for (int64_t i = 0; i < size.rows * cols; ++i) given.as<uint8_t>()[i] = i % p.m == p.m - 1 || (p.n > 1 && i % p.m == i / p.m % p.m);
        for (bool masked : {false, true}) {
            same_everywhere(p, dtype, [&](int threads) {
                Outputs out;
                out.emplace_back(size.rows * kept, size_of(dtype));
                out.emplace_back(size.rows * bytes, 1);
                const bool fits = nm::kernels().compress(w.data(), dtype, size.rows, cols, p.n, p.m, masked ? given.as<uint8_t>() : nullptr,
                                                         out[0].data(), out[1].as<uint8_t>(), threads);
                CHECK(fits) << label(p, dtype, nm::isa());
                // back to dense, whole, and cut off inside the last group
                for (int64_t ends : {cols, cols - p.m + 1}) {
                    out.emplace_back(size.rows * ends, size_of(dtype));
                    CHECK(nm::kernels().decompress(out[0].data(), out[1].as<uint8_t>(), dtype, size.rows, ends, p.n, p.m, out.back().data(), threads))
                        << label(p, dtype, nm::isa());
                }
                return out;
            });
        }
    });
}

TEST(a_mask_that_keeps_too_many_is_refused) {
    const Buffer w = numbers(3 * 64, nm::kFloat32, 1, false);
    Buffer given(3 * 64, 1);
    std::memset(given.data(), 0, given.bytes());
    given.as<uint8_t>()[131] = given.as<uint8_t>()[130] = given.as<uint8_t>()[129] = 1;
    each_isa([&](const std::string& isa) {
        Buffer values(3 * 32, 4), indices(3 * 8, 1);
        CHECK(!nm::kernels().compress(w.data(), nm::kFloat32, 3, 64, 2, 4, given.as<uint8_t>(), values.data(), indices.as<uint8_t>(), 2)) << isa;
    });
}

TEST(damaged_indices_are_refused) {
    for (NM p : {NM{1, 3}, NM{3, 5}, NM{1, 12}, NM{5, 48}}) {
        for (int64_t groups : {int64_t(1), int64_t(29)}) {
            const int64_t kept = groups * p.n, bytes = nm::index_bytes(kept, nm::index_bits(p.m));
            for (int64_t where : {int64_t(0), kept - 1}) {
                Buffer values(2 * kept, 4), indices(2 * bytes, 1), dense(2 * groups * p.m, 4);
                std::memset(values.data(), 0, values.bytes());
                std::memset(indices.data(), 0, indices.bytes());
                nm::put_index(indices.as<uint8_t>() + bytes, where, nm::index_bits(p.m), p.m);
                each_isa([&](const std::string& isa) {
                    CHECK(!nm::kernels().decompress(values.data(), indices.as<uint8_t>(), nm::kFloat32, 2, groups * p.m, p.n, p.m, dense.data(), 2))
                        << label(p, nm::kFloat32, isa) << " at " << where;
                });
            }
        }
    }
}

TEST(transposable_masks_agree) {
    for (NM p : {NM{2, 4}, NM{1, 4}, NM{3, 8}, NM{4, 16}}) {
        for (int dtype : kDtypes) {
            for (Size size : {Size{1, 1}, Size{1, 5}, Size{3, 17}, Size{2, 33}}) {
                if (p.m > 4 && size.groups > 5) continue;
                const int64_t rows = size.rows * p.m, cols = size.groups * p.m;
                const Buffer w = numbers(rows * cols, dtype, uint64_t(cols), true);
                same_everywhere(p, dtype, [&](int threads) {
                    Outputs out;
                    out.emplace_back(rows * cols, 1);
                    nm::kernels().transposable_mask(w.data(), dtype, rows, cols, p.n, p.m, out[0].as<uint8_t>(), threads);
                    return out;
                });
            }
        }
    }
}

TEST(fingerprints_agree_and_see_every_byte) {
    for (int64_t bytes : {int64_t(0), int64_t(1), int64_t(63), int64_t(64), int64_t(1000), int64_t(65536), int64_t(65537), int64_t(3 * 65536 + 5)}) {
        Buffer data(bytes, 1);
        for (int64_t i = 0; i < bytes; ++i) data.as<uint8_t>()[i] = uint8_t(i * i + i / 7);
        uint64_t expected = 0;
        bool first = true;
        each_isa([&](const std::string& isa) {
            for (int threads : {1, 3}) {
                const uint64_t got = nm::kernels().fingerprint(data.data(), bytes, threads);
                if (first) expected = got;
                first = false;
                CHECK(got == expected) << isa << ", " << bytes << " bytes";
            }
            for (int64_t i = 0; i < bytes; i += bytes > 2000 ? 997 : 1) {
                data.as<uint8_t>()[i] ^= 1;
                CHECK(nm::kernels().fingerprint(data.data(), bytes, 2) != expected) << isa << ", byte " << i << " of " << bytes;
                data.as<uint8_t>()[i] ^= 1;
            }
        });
    }
}

}  // namespace
