// Products on sparse tensor cores, and the metadata that they read, against sums in double; every operand ends where its
// tensor ends.
#include <cmath>
#include <stdexcept>

#include "../../core/bitpack.h"
#include "../../cuda/gemm/wgmma_plan.h"
#include "emulated.h"

using namespace nm_test;

namespace {

constexpr int kMmaSp = 1, kWgmmaSp = 2;  // of cuda/packing.h
constexpr int kTiles = 3, kSmall = 2;

// Canonical 2:4 indices: one of the six ordered pairs in each nibble, changing from group to group.
Buffer some_indices(int64_t rows, int64_t cols, bool wide) {
    constexpr uint8_t pairs[] = {0x4, 0x8, 0xc, 0x9, 0xd, 0xe};
    Buffer indices = place(rows * cols / 8, 1, wide);
    uint32_t state = 4711;
    const auto next = [&] { return pairs[((state = state * 1664525u + 1013904223u) >> 16) % 6u]; };
    for (size_t i = 0; i < indices.bytes(); ++i) {
        const uint8_t low = next();
        indices.as<uint8_t>()[i] = uint8_t(low | next() << 4);
    }
    return indices;
}

// Element (row, k) of the matrix that values and canonical indices are of, 0 where nothing is stored.
double element(const Buffer& values, const Buffer& indices, int dtype, int64_t row, int64_t k, int64_t depth) {
    for (int64_t v = k / 4 * 2; v < k / 4 * 2 + 2; ++v) {
        if (nm::get_index(indices.as<uint8_t>() + row * depth / 8, v, 2) == k % 4) return number(values, dtype, row * depth / 2 + v);
    }
    return 0.0;
}

struct Sizes {
    int64_t m, n, k;
};

void one(Sizes s, bool by_column, int tile, int splits, int dtype, int layout, bool epilogue) {
    const Buffer values = placed(numbers(s.m * s.k / 2, dtype, 1, false), true, 2), dense = placed(numbers(s.n * s.k, dtype, 2, false), true, 2);
    const Buffer bias = placed(numbers(s.m, dtype, 3, false), true, 2), residual = placed(numbers(s.n * s.m, dtype, 4, false), true, 2);
    const Buffer indices = some_indices(s.m, s.k, false), words = place(s.m * s.k / 32, 4, true);
    const Buffer out = place(s.m * s.n, 2, true), parts = place(splits > 1 ? splits * s.m * s.n : 0, 4, true);
    nm::cuda::metadata(indices.as<uint8_t>(), s.m, s.k, layout, words.as<uint32_t>(), kQueue);
    nm::cuda::gemm_mma_sp({values.data(), words.as<uint32_t>(), dense.data(), epilogue ? bias.data() : nullptr, epilogue ? residual.data() : nullptr,
                           out.data(), parts.as<float>(), dtype, 0, s.m, s.n, s.k, by_column, layout == kMmaSp ? 1 : 4, tile, splits}, kQueue);
    for (int64_t row = 0; row < s.m; ++row) {
        for (int64_t col = 0; col < s.n; ++col) {
            double sum = epilogue ? number(bias, dtype, row) : 0.0, size = std::fabs(sum);
            for (int64_t k = 0; k < s.k; ++k) {
                const double term = element(values, indices, dtype, row, k, s.k) * number(dense, dtype, by_column ? k * s.n + col : col * s.k + k);
                sum += term;
                size += std::fabs(term);
            }
            const int64_t at = by_column ? row * s.n + col : col * s.m + row;
            if (epilogue) sum += number(residual, dtype, at), size += std::fabs(number(residual, dtype, at));
            CHECK(std::fabs(number(out, dtype, at) - sum) <= (dtype == nm::kBFloat16 ? 2e-2 : 3e-3) * (size + 1e-3))
                << s.m << "x" << s.n << "x" << s.k << (by_column ? " by column" : "") << ", tile " << tile << ", parts " << splits << ", at " << row
                << ", " << col << ": " << number(out, dtype, at) << ", not " << sum;
        }
    }
}

TEST(gemm_ends_where_its_operands_end) {
    for (int tile = 0; tile < kTiles; ++tile) {
        for (Sizes s : {Sizes{16, 1, 64}, Sizes{80, 9, 128}, Sizes{48, 67, 64}, Sizes{16, 3, 320}}) {
            for (int dtype : {nm::kBFloat16, nm::kFloat16}) one(s, false, tile, 1, dtype, kMmaSp, s.n > 1);
        }
        one({64, 5, 128}, false, tile, 1, nm::kBFloat16, kWgmmaSp, false);
        one({16, 5, 576}, false, tile, 2, nm::kFloat16, kMmaSp, true);
        if (tile == kSmall) continue;
        for (Sizes s : {Sizes{16, 8, 64}, Sizes{80, 72, 128}, Sizes{16, 136, 64}}) one(s, true, tile, 1, nm::kBFloat16, kMmaSp, false);
        one({64, 8, 576}, true, tile, 3, nm::kFloat16, kWgmmaSp, false);
    }
    one({272, 130, 64}, false, 0, 1, nm::kBFloat16, kMmaSp, true);
}

TEST(gemm_refuses_what_is_no_whole_tile) {
    for (Sizes s : {Sizes{24, 8, 64}, Sizes{16, 8, 32}, Sizes{16, 4, 64}}) {
        bool refused = false;
        try {
            nm::cuda::gemm_mma_sp({nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nm::kBFloat16, 0, s.m, s.n, s.k, true, 1, 1, 1}, kQueue);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused) << s.m << "x" << s.n << "x" << s.k;
    }
}

TEST(metadata_ends_where_its_indices_end) {
    for (int layout : {kMmaSp, kWgmmaSp}) {
        for (int64_t cols : {64, 128, 320, 576}) {
            for (bool wide : {true, false}) {
                const int64_t rows = layout == kMmaSp ? 48 : 128;
                const Buffer indices = some_indices(rows, cols, wide), words = place(rows * cols / 32, 4, true);
                nm::cuda::metadata(indices.as<uint8_t>(), rows, cols, layout, words.as<uint32_t>(), kQueue);
                int64_t sum = 0, expected = 0;
                for (size_t i = 0; i < words.bytes(); ++i) sum += words.as<uint8_t>()[i], expected += indices.as<uint8_t>()[i];
                CHECK(sum == expected) << rows << "x" << cols;  // a permutation; python_tests have its order
            }
        }
    }
}

bool about(double x, double expected) { return std::fabs(x / expected - 1.0) < 1e-3; }

// By hand: 0.9 * 2 * memory clock * bytes of a transfer / (clock * multiprocessors).
TEST(plans_know_what_a_gpu_does_in_a_cycle) {
    using namespace nm::cuda::gemm;
    const nm::cuda::Gpu a100{80, 108, 163 << 10, 1410000, 1593000, 5120}, h100{90, 132, 227 << 10, 1980000, 2619000, 5120};
    const nm::cuda::Gpu h200{90, 132, 227 << 10, 1980000, 3201000, 6144}, l40s{89, 142, 99 << 10, 2520000, 9001000, 384};
    CHECK(about(rates_of(a100).bytes, 12.05) && about(rates_of(h100).bytes, 11.544) && about(rates_of(h200).bytes, 16.931));
    CHECK(about(rates_of(l40s).bytes, 2.1733) && rates_of({90, 132, 227 << 10, 1980000, 0, 0}).bytes == 12);
    CHECK(rates_of(a100).multiplies == 2048 && rates_of(h200).multiplies == 2560 && rates_of(l40s).multiplies == 1024);
    CHECK(about(rates_of(a100).launch, 3948) && about(rates_of(h100).launch, 5544));

    // 4 x 2 warps of 64x64 read 102400 bytes of a slab, 34816 are copied: 1072 cycles of shared memory; products take 256 * 128 * 64 of
    // them 1024 on an A100, 819 on a Hopper, 2048 on an L40S
    CHECK(slab_cycles<Large>(rates_of(a100)) == 1072 && slab_cycles<Large>(rates_of(h200)) == 1072 && slab_cycles<Large>(rates_of(l40s)) == 2048);
    CHECK(slab_cycles<Middle>(rates_of(h100)) == 600 && slab_cycles<Middle>(rates_of(l40s)) == 1024);

    // 5120 x 64 x 11008, in one part and in three, as test_gemm.py reckons it: the longer of the two, an eighth of the other, and for
    // parts 7.86 MB more and a launch
    const auto small = [&](const nm::cuda::Gpu& gpu, int64_t part, int splits) {
        return estimated<Small>(5120, 64, 11008, part, splits, gpu.processors, rates_of(gpu));
    };
    CHECK(about(small(h100, 172, 1), 52256 + 42965 / 8.0) && about(small(h100, 58, 3), 42965 + 36112 / 8.0 + 5161 + 5544));
    CHECK(about(small(h200, 172, 1), 52256 + 29294 / 8.0) && about(small(h200, 58, 3), 36112 + 29294 / 8.0 + 3519 + 5544));
}

// Of 64 deep: products at 4096 a cycle; bytes at 128, B read once for every 64 rows, everything copied once; and from L2 at 32, of B
// a cluster of two copies half each.
TEST(wgmma_plans_know_what_binds) {
    using namespace nm::cuda::gemm;
    CHECK(wide_slab_cycles<Wide>() == 912 + 336 && wide_slab_cycles<Broad>() == 656 + 272 && wide_slab_cycles<Square>() == (9216 + 8192) / 32.0);
    CHECK(wide_slab_cycles<Narrow>() == 17408 / 32.0 && wide_slab_cycles<Thin>() == 11264 / 32.0);
    CHECK(Wide::kShared == 4 * 43008 + 32768 + 64 && Wide::kShared <= 227 * 1024 && Wide::kSums * Wide::kDown == 192);

    // 8192 cubed: 688 clusters for 66 pairs are 11 rounds of 128 slabs, and memory delivers operands meanwhile
    const nm::cuda::Gpu h100{90, 132, 227 << 10, 1980000, 2619000, 5120};
    const double busy = 11 * (128 * 1248 + 256 * 192 / 16) + 1500, memory = 8192.0 * 8192 * (1.125 + 2 + 2) / (rates_of(h100).bytes * 132);
    CHECK(about(wide_estimated<Wide>(8192, 8192, 8192, 128, 1, 132, rates_of(h100)), busy + memory / 8));
}

// PTX ISA 9.7.15.5.1.2: address, leading and stride offset in 16 bytes from bits 0, 16 and 32 on, the swizzle's code from bit 62 on.
TEST(wgmma_descriptors) {
    using namespace nm::cuda::gemm;
    static_assert(descriptor(0x12340, 8192, 1024, kSwizzle128) == (0x1234ull | 512ull << 16 | 64ull << 32 | 1ull << 62));
    static_assert(values_descriptor(0x8000, 1) == (0x802ull | 32ull << 32 | 2ull << 62), "32 of k are 32 bytes of packed values");
    static_assert(dense_descriptor(0x400, 1, false) == (0x44ull | 64ull << 32 | 1ull << 62), "64 bytes of B by k");
    static_assert(dense_descriptor(0x400, 1, true) == (0x140ull | 512ull << 16 | 64ull << 32 | 1ull << 62), "32 rows of 128 bytes by column");
    static_assert(values_descriptor(0x38000, 0) == values_descriptor(0x38000 & 0x3ffff, 0), "addresses of 18 bits");
    CHECK(Wide::kDense % 1024 == 0 && Wide::kStage % 1024 == 0 && Thin::kStage % 1024 == 0);
}

}  // namespace
