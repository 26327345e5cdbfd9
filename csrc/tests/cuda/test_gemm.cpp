// Products on sparse tensor cores, and the metadata that they read, against sums in double; every operand ends where its
// tensor ends.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

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

// Every slab of every tile is done by one cluster; a share is at most a tile and as long as any; places of pieces are all different, and
// those of a tile follow each other in the order of k.
TEST(stream_k_does_every_slab_once) {
    using namespace nm::cuda::gemm;
    for (int processors : {1, 2, 7, 12, 132}) {
        for (int64_t m : {64, 1024, 5120, 33 * 512}) {
            for (int64_t n : {1, 130, 960}) {
                for (int64_t k : {64, 320, 4096}) {
                    const StreamK work = stream_of<Wide>(m, n, k, processors);
                    const int64_t tiles = nm::cuda::cdiv(m, 512) * nm::cuda::cdiv(n, 192), slabs = k / 64;
                    std::vector<int> done(size_t(tiles * slabs)), place(size_t(work.places()), 0);
                    CHECK(work.whole + work.units / work.slabs == tiles && work.share <= work.slabs && work.clusters <= std::max(1, processors / 2));
                    for (int cluster = 0; cluster < work.clusters; ++cluster) {
                        for (int turn = work.start(cluster); work.more(cluster, turn); turn = work.next(cluster, turn)) {
                            const Piece piece = work.piece(cluster, turn);
                            CHECK(piece.first < piece.last && piece.last <= slabs);
                            for (int slab = piece.first; slab < piece.last; ++slab) ++done[size_t(piece.tile * slabs + slab)];
                            if (piece.tile < work.whole) continue;
                            CHECK(++place[size_t(work.place(cluster, piece.tile))] == 1);
                            const int begin = (piece.tile - work.whole) * work.slabs;
                            CHECK(cluster >= begin / work.share && cluster <= (begin + work.slabs - 1) / work.share) << "where the second launch reads";
                        }
                    }
                    CHECK(std::count(done.begin(), done.end(), 1) == tiles * slabs) << m << "x" << n << "x" << k << " on " << processors;
                }
            }
        }
    }
}

// 14336 x 4096 with 4096 tokens: 616 clusters' tiles for 66 pairs are 9 waves and 22 tiles of 64 slabs, 22 for each pair.
TEST(stream_k_plans) {
    using namespace nm::cuda::gemm;
    const nm::cuda::Gpu h100{90, 132, 227 << 10, 1980000, 2619000, 5120};
    const StreamK work = stream_of<Wide>(14336, 4096, 4096, 132);
    CHECK(work.whole == 594 && work.units == 22 * 64 && work.share == 22 && work.clusters == 66 && work.places() == 88);
    CHECK(stream_floats<Wide>(work) == 88 * 2 * 256 * 192);
    const double sums = 256 * 192 * 4 / 32.0, busy = 9 * (64 * 1248 + 256 * 192 / 16) + 22 * 1248 + 2 * sums + 1500;
    const double memory = (14336.0 * 4096 * 1.125 + 2 * 4096.0 * 4096 + 2 * 14336.0 * 4096) / (rates_of(h100).bytes * 132);
    CHECK(about(stream_estimated<Wide>(14336, 4096, 4096, 132, rates_of(h100)), busy + memory / 8 + rates_of(h100).launch + 88 * 2 * sums / 132));
    CHECK(std::isinf(stream_estimated<Wide>(33 * 512, 192 * 4, 4096, 132, rates_of(h100)))) << "two waves";
}

// The second launch, in whole numbers: D from sums as the kernel leaves them, in registers' order; whole tiles are not touched.
TEST(stream_k_adds_pieces) {
    using namespace nm::cuda::gemm;
    constexpr int processors = 3, rows = 128, cols = 64;
    constexpr int64_t m = 640, n = 60, k = 320;  // five tiles of the narrow kind: a wave, and two tiles for three clusters
    const StreamK work = stream_of<Narrow>(m, n, k, processors);
    for (int dtype : {nm::kBFloat16, nm::kFloat16}) {
        const Buffer parts = place(stream_floats<Narrow>(work), 4, true), out = place(m * n, 2, true), bias = placed(numbers(m, dtype, 3, false), true, 2);
        for (int cluster = 0; cluster < work.clusters; ++cluster) {
            for (int turn = work.start(cluster); work.more(cluster, turn); turn = work.next(cluster, turn)) {
                const Piece piece = work.piece(cluster, turn);
                if (piece.last - piece.first == work.slabs) continue;
                for (int thread = 0; thread < 256; ++thread) {
                    for (int d = 0; d < 32; ++d) {  // PTX ISA 9.7.15.5.1: row, column of d
                        const int row = thread / 128 * 64 + thread / 32 % 4 * 16 + thread % 32 / 4 + d / 2 % 2 * 8, col = d / 4 * 8 + thread % 4 * 2 + d % 2;
                        parts.as<float>()[work.place(cluster, piece.tile) * rows * cols + d / 4 * 1024 + thread * 4 + d % 4] =
                            float((piece.last - piece.first) * (row % 7 - 3) + col % 5);
                    }
                }
            }
        }
        nm::cuda::GemmCall call{nullptr, nullptr, nullptr, bias.data(), nullptr, out.data(), parts.as<float>(), dtype, 0, m, n, k, false, 4, kNarrow, kStreamK};
        std::memset(out.data(), 0xff, out.bytes());
        nm::cuda::gemm_stream_k_finish(call, processors, kQueue);
        for (int64_t row = 0; row < m; ++row) {
            for (int64_t col = 0; col < n; ++col) {
                const int tile = int(row / rows), begin = (tile - work.whole) * work.slabs;
                const bool whole = tile < work.whole;
                const int pieces = whole ? 1 : (begin + work.slabs - 1) / work.share - begin / work.share + 1;
                const double sum = 5 * (row % rows % 7 - 3) + double(pieces) * (col % 5);
                const double expected = double(dtype == nm::kBFloat16 ? nm::to_float(nm::from_float<nm::bf16>(float(sum + number(bias, dtype, row))))
                                                                      : nm::to_float(nm::from_float<nm::fp16>(float(sum + number(bias, dtype, row)))));
                const double found = number(out, dtype, col * m + row);
                CHECK(whole ? std::isnan(found) : found == expected) << row << ", " << col << ": " << found << ", not " << expected;
            }
        }
    }
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
