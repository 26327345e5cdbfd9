// The indices of every kernel beyond 2^31 elements, where 32 bits do not suffice: of each grid some blocks at its beginning and at
// its end run, in the memory of huge.h, and what the end wrote is compared with the same rows alone.
#include <cmath>

#include "../../core/bitpack.h"
#include "../../core/mvue.h"
#include "../../core/philox.h"
#include "../../cuda/adamw_table.h"
#include "../../cuda/packing.h"
#include "../huge.h"
#include "emulated.h"

using namespace nm_test;
using namespace nm::cuda;

namespace {

constexpr int64_t kCols = 1 << 14, kRows = kElements / kCols, kDepth = 1 << 10, kLong = kElements / kDepth;
constexpr int kType = nm::kBFloat16;
static_assert(kRows % 64 == 0 && kLong % 64 == 0);

// A matrix of `rows`, each of `line` bytes, and beside it one of its last `few` rows.
struct Pair {
    Pair(int64_t rows, int64_t line, int64_t few) : huge(rows * line), alone(few * line, 1, 0), rows(rows), line(line), few(few) {
        CHECK(huge.ok()) << "no room for the mappings";
        std::memset(huge.last(), 0x11, size_t(kTile));
    }
    // With numbers, the same in both.
    Pair& filled(uint64_t seed) {
        fill(huge.data(), seed);
        fill(huge.last(), seed + 1);
        std::memcpy(alone.data(), huge.data() + (rows - few) * line, alone.bytes());
        return *this;
    }
    // With one byte; 0xe4 as indices: the elements 0 and 1 of a group, then 2 and 3.
    void set(int byte) {
        std::memset(huge.data(), byte, size_t(kTile));
        std::memset(huge.last(), byte, size_t(kTile));
        std::memset(alone.data(), byte, alone.bytes());
    }
    template <class T = void>
    T* at(bool whole) const {
        return reinterpret_cast<T*>(whole ? huge.data() : alone.as<char>());
    }
    // The last `bytes` of the last rows.
    void check(const std::string& what, int64_t of_rows = 1, int64_t bytes = 16) const {
        for (int64_t row = 0; row < of_rows; ++row) {
            CHECK(std::memcmp(huge.data() + (rows - row) * line - bytes, alone.as<char>() + (few - row) * line - bytes, size_t(bytes)) == 0)
                << what << ", row " << row << " from the end";
        }
    }

    Huge huge;
    Buffer alone;
    int64_t rows, line, few;
};

// While it lives, only so many blocks at the beginning and at the end of a grid run.
struct EndsOnly {
    explicit EndsOnly(unsigned blocks) { nm::emulator::ends = blocks; }
    ~EndsOnly() { nm::emulator::ends = ~0u; }
};

// f(whether it is the whole matrix, its rows)
template <class F>
void both(const Pair& of, const F& f, unsigned blocks = 4) {
    f(false, of.few);
    const EndsOnly some(blocks);
    f(true, of.rows);
}

TEST(large_groups) {
    Pair w(kRows, kCols * 2, 16);
    w.filled(1);
    for (NM p : {NM{2, 4}, NM{3, 4}}) {
        const Pair flags(kRows, kCols, 16), pruned(kRows, kCols * 2, 16), soft(kRows, kCols * 2, 16);
        both(w, [&](bool whole, int64_t rows) {
            mask(w.at(whole), kType, rows * kCols, p.n, p.m, flags.at<uint8_t>(whole), kQueue);
            prune(w.at(whole), kType, rows * kCols, p.n, p.m, pruned.at(whole), kQueue);
            soft_threshold(w.at(whole), kType, rows * kCols, p.n, p.m, soft.at(whole), kQueue);
        });
        flags.check(label(p, kType, "mask"));
        pruned.check(label(p, kType, "prune"));
        soft.check(label(p, kType, "soft_threshold"));
    }
}

TEST(large_scale) {
    Pair w(kRows, kCols * 2, 16);
    w.filled(3);
    for (NM p : {NM{2, 4}, NM{3, 4}}) {
        double last[2][2];
        both(w, [&](bool whole, int64_t rows) {
            const int64_t chunks = soft_threshold_chunks(rows * kCols, p.n, p.m);
            const Buffer sums(2 * chunks, 8, 0), scale(1, 4, 0);
            soft_threshold_scale(w.at(whole), kType, rows * kCols, p.n, p.m, sums.data(), scale.as<float>(), kQueue);
            std::memcpy(last[whole], sums.as<double>() + 2 * (chunks - 1), sizeof last[whole]);
        });
        CHECK(last[0][1] > 0 && std::memcmp(last[0], last[1], sizeof last[0]) == 0) << label(p, kType, "scale");
    }
}

TEST(large_transposable) {
    Pair w(kRows, kCols * 2, 16);
    w.filled(5);
    const Pair flags(kRows, kCols, 16);
    both(w, [&](bool whole, int64_t rows) { transposable_mask(w.at(whole), kType, rows, kCols, flags.at<uint8_t>(whole), kQueue); });
    flags.check("transposable mask", 4);
}

// The end of the last packed column, of which a huge weight has longer ones than a small.
void check_columns(const Huge& huge, int64_t line, const Buffer& alone, int64_t few, int64_t bytes, const std::string& what) {
    for (int64_t column = 0; column < 4; ++column) {
        CHECK(std::memcmp(huge.data() + (kCols - column) * line - bytes, alone.as<char>() + (kCols - column) * few - bytes, size_t(bytes)) == 0)
            << what << ", column " << column << " from the end";
    }
}

TEST(large_packs) {
    Pair w(kRows, kCols * 2, 64);
    w.filled(7);
    struct Way {
        int n, m, select, layout;
        bool columns;
    };
    for (Way way : {Way{2, 4, kMagnitude, kCanonical, false}, Way{3, 4, kMagnitude, kCanonical, true}, Way{2, 4, kTransposable, kCanonical, true},
                    Way{2, 4, kTransposable, kMmaSp, true}}) {
        const int64_t kept = way.n * kCols / 4, few = way.n * 16, many = way.n * kRows / 4;  // of a row, and of a column of 64 or of all
        const Pair values(kRows, kept * 2, 64), indices(kRows, kept / 4, 64);
        const Huge values_t(kCols * many * 2), indices_t(kCols * many / 4);
        const Buffer values_few(kCols * few, 2, 0), indices_few(kCols * few / 4, 1, 0), overfull(1, 4, 0);
        both(w, [&](bool whole, int64_t rows) {
            const Packed by_row{values.at(whole), indices.at(whole)};
            const Packed by_column{whole ? values_t.data() : values_few.data(), whole ? indices_t.data() : indices_few.data()};
            const bool done = pack({w.at(whole), nullptr, nullptr, overfull.as<int>(), by_row, way.columns ? by_column : Packed{nullptr, nullptr}, rows, kCols,
                                    way.n, way.m, kType, kType, way.select, way.layout}, kQueue);
            CHECK(done) << "no kernel";
        });
        const std::string what = label({way.n, way.m}, kType, "pack ") + std::to_string(way.select) + std::to_string(way.layout);
        values.check(what + " values", way.select == kTransposable ? 4 : 1, 8);
        indices.check(what + " indices", 1, 4);
        if (!way.columns) continue;
        check_columns(values_t, many * 2, values_few, few * 2, 8, what + " values of columns");
        if (way.layout == kCanonical) check_columns(indices_t, many / 4, indices_few, few / 4, way.n == 2 ? 2 : 1, what + " indices of columns");
    }
}

TEST(large_decompress) {
    for (NM p : {NM{2, 4}, NM{4, 4}}) {
        const int64_t kept = p.n * kCols / 4;
        Pair values(kRows, kept * 2, 16), indices(kRows, kept / 4, 16);
        values.filled(9);
        indices.set(0xe4);
        const Pair dense(kRows, kCols * 2, 16);
        both(values, [&](bool whole, int64_t rows) {
            decompress(values.at(whole), indices.at(whole), kType, rows, kCols, p.n, p.m, dense.at(whole), kQueue);
        });
        dense.check(label(p, kType, "decompress"));
    }
}

// Indices of more than 2^31 bytes.
TEST(large_metadata) {
    for (int layout : {kMmaSp, kWgmmaSp}) {
        Pair indices(kRows, kCols, 64);
        indices.filled(13);
        const Pair words(kRows, kCols, 64);
        both(indices, [&](bool whole, int64_t rows) {
            metadata(indices.at<uint8_t>(whole), rows, kCols * 8, layout, words.at<uint32_t>(whole), kQueue);
        });
        words.check("metadata");
    }
}

// The last group of all: its words are those of its number, so that the same rows alone would have others.
TEST(large_mvue) {
    Pair g(kRows, kCols * 2, 16);
    g.filled(15);
    const int64_t seed[2] = {5, int64_t(1) << 33}, last = kElements / 4 - 1;
    for (bool columns : {false, true}) {
        nm::bf16 x[4], result[4], stored[4];
        nm::Group<4> group;
        uint8_t keep[4], places[4];
        const auto* elements = reinterpret_cast<const nm::bf16*>(g.huge.data());
        const auto place_of = [&](int i) { return columns ? (kRows - 4 + i) * kCols + kCols - 1 : kElements - 4 + i; };
        for (int i = 0; i < 4; ++i) {
            x[i] = elements[place_of(i)];
            group.a[i] = nm::magnitude(nm::to_float(x[i]));
        }
        for (bool approx : {false, true}) {
            const nm::Words words = nm::philox_block(uint64_t(seed[0]), uint64_t(seed[1]), uint64_t(approx ? last : last >> 2));
            approx ? group.approx(4, words.w[0] >> 8, words.w[1] >> 8) : group.exact<nm::bf16>(2, 4, words.w[last & 3]);
            for (int i = 0; i < 4; ++i) {
                result[i] = group.result<nm::bf16>(i, x[i]);
                keep[i] = !nm::is_zero(result[i]);
            }
            nm::compact_group(result, keep, 2, 4, stored, places);
            const Pair dense(kRows, kCols * 2, 16), values(kRows, kCols, 16), indices(kRows, kCols / 8, 16);
            const int64_t outer = 1, length = columns ? kRows : kElements, inner = columns ? kCols : 1;
            {
                const EndsOnly some(4);
                mvue(g.huge.data(), kType, outer, length, inner, 2, 4, seed, approx, dense.huge.data(), kQueue);
                mvue_compress(g.huge.data(), kType, outer, length, inner, 2, 4, seed, approx, values.huge.data(), indices.at<uint8_t>(true), false, kQueue);
            }
            const std::string what = std::string(columns ? "columns" : "rows") + (approx ? ", approx" : "");
            for (int i = 0; i < 4; ++i) {
                CHECK(dense.at<nm::bf16>(true)[place_of(i)].bits == result[i].bits) << "mvue of " << what << ", element " << i;
            }
            for (int i = 0; i < 2; ++i) {
                CHECK(values.at<nm::bf16>(true)[kElements / 2 - 2 + i].bits == stored[i].bits) << "values of " << what << " " << i;
                CHECK(nm::get_index(indices.at<uint8_t>(true), kElements / 2 - 2 + i, 2) == places[i]) << "indices of " << what << " " << i;
            }
        }
    }
}

// Weights of 2^31 stored values, and products for 1 to 16 tokens. So many multiprocessors that a block has few rows, and not so many
// that rows are cut; sums of another order than with few rows.
TEST(large_products_of_few_tokens) {
    constexpr int64_t rows_of_all = 2 * kLong;
    constexpr int processors = 1 << 17;
    Pair values(rows_of_all, kDepth, 16), indices(rows_of_all, kDepth / 8, 16);
    values.filled(17);
    indices.set(0xe4);
    const auto mma_splits = [](int dtype, int64_t tokens, int64_t rows, int64_t cols, int n, int m, int processors_of) {
        return linear_mma_splits(dtype, tokens, rows, cols, n, m, processors_of, 163 << 10);
    };
    struct Way {
        void (*kernel)(const LinearCall&, const Queue&);
        int (*splits)(int, int64_t, int64_t, int64_t, int, int, int);
        const char* name;
        int64_t tokens;
    };
    for (Way way : {Way{linear_few, linear_few_splits, "few", 1}, Way{linear_few, linear_few_splits, "few", 4},
                    Way{linear_mma, mma_splits, "mma", 16}, Way{linear_expand, linear_expand_splits, "expand", 9}}) {
        const Buffer x = placed(numbers(way.tokens * kDepth, kType, 21, false), true, 2);
        const Buffer y = place(way.tokens * rows_of_all, 2, true), alone = place(way.tokens * 16, 2, true);
        both(values, [&](bool whole, int64_t rows) {
            const int target = whole ? processors : 1;
            CHECK(way.splits(kType, way.tokens, rows, kDepth, 2, 4, target) == 1) << way.name;
            way.kernel({x.data(), values.at(whole), indices.at<uint8_t>(whole), nullptr, (whole ? y : alone).data(), nullptr, kType, 0, way.tokens, rows, kDepth,
                        2, 4, 1, target}, kQueue);
        }, 1);
        for (int64_t token = 0; token < way.tokens; ++token) {
            const double got = number(y, kType, (token + 1) * rows_of_all - 1), expected = number(alone, kType, token * 16 + 15);
            CHECK(std::fabs(got - expected) <= 0.02 * std::fabs(expected) && expected != 0) << way.name << " token " << token << ": " << got << ", not " << expected;
        }
    }
}

struct Gemm {
    int64_t m, n, k;
    bool by_column;
    int tile, splits;
};

// values, metadata and dense of a product, from which one alone has the last rows of A, of B, or the last columns of B.
void multiply(const Gemm& g, const void* values, const void* words, const void* dense, void* out, float* parts) {
    gemm_mma_sp({values, static_cast<const uint32_t*>(words), dense, nullptr, nullptr, out, parts, kType, 0, g.m, g.n, g.k, g.by_column, 1, g.tile, g.splits}, kQueue);
}

Buffer some_metadata(int64_t rows, int64_t cols) {
    Buffer words(rows * cols / 8, 1, 0);
    std::memset(words.data(), 0xe4, words.bytes());
    return words;
}

TEST(large_gemm_operands) {
    // A, in canonical order of rows of 16
    Pair values(2 * kLong, kDepth, 64), words(2 * kLong, kDepth / 8, 64);
    values.filled(23);
    words.set(0xe4);
    const Buffer token = numbers(kDepth, kType, 25, false), x = placed(token, true, 2);
    const Buffer y(2 * kLong, 2, 0), alone(64, 2, 0);
    both(values, [&](bool whole, int64_t rows) {
        multiply({rows, 1, kDepth, false, 2, 1}, values.at(whole), words.at(whole), x.data(), (whole ? y : alone).data(), nullptr);
    }, 1);
    CHECK(y.as<nm::bf16>()[2 * kLong - 1].bits == alone.as<nm::bf16>()[63].bits) << "A";

    // B, and D of so many rows
    const Buffer weight = placed(numbers(16 * kDepth / 2, kType, 27, false), true, 2), order = some_metadata(16, kDepth);
    Pair dense(kLong, kDepth * 2, 64);
    dense.filled(29);
    const Pair out(kLong, 16 * 2, 64);
    both(dense, [&](bool whole, int64_t rows) {
        multiply({16, rows, kDepth, false, 2, 1}, weight.data(), order.data(), dense.at(whole), out.at(whole), nullptr);
    }, 1);
    out.check("B", 4);
}

TEST(large_gemm_results) {
    // y [tokens, out], and its parts in fp32
    const Buffer weight = placed(numbers(kDepth * 128 / 2, kType, 31, false), true, 2), order = some_metadata(kDepth, 128);
    Pair x(kLong, 128 * 2, 64);
    x.filled(33);
    for (int splits : {1, 2}) {
        const Pair y(kLong, kDepth * 2, 64), parts(kLong * splits, kDepth * 4, 64 * splits);
        both(x, [&](bool whole, int64_t rows) {
            multiply({kDepth, rows, 128, false, 2, splits}, weight.data(), order.data(), x.at(whole), y.at(whole), parts.at<float>(whole));
        }, 1);
        if (splits > 1) {
            parts.check("the last part of y", 4);
        } else {
            y.check("y", 4);
        }
    }

    // dw [out, in], whose rows are as long as those of x [tokens, in]
    constexpr int64_t wide = kElements / 128;
    const Buffer gradient = placed(numbers(128 * 64 / 2, kType, 35, false), true, 2), places = some_metadata(128, 64);
    Pair inputs(64, wide * 2, 1);
    inputs.filled(37);
    const Pair dw(128, wide * 2, 1);
    {
        const EndsOnly some(1);
        multiply({128, wide, 64, true, 1, 1}, gradient.data(), places.data(), inputs.huge.data(), dw.huge.data(), nullptr);
    }
    const Buffer narrow(64 * 128, 2, 0), result(128 * 128, 2, 0);
    for (int64_t row = 0; row < 64; ++row) std::memcpy(narrow.as<char>() + row * 256, inputs.huge.data() + (row + 1) * wide * 2 - 256, 256);
    multiply({128, 128, 64, true, 1, 1}, gradient.data(), places.data(), narrow.data(), result.data(), nullptr);
    CHECK(std::memcmp(dw.huge.data() + 128 * wide * 2 - 16, result.as<char>() + 128 * 256 - 16, 16) == 0) << "dw";
}

// A step of one param: flat, or by rows.
TEST(large_adamw) {
    const double hyper[8] = {0.01, 0.9, 0.999, 1e-8, 0.1, 2e-4, 0.0, 0.0};
    for (bool flat : {true, false}) {
        Pair weight(kRows, kCols * 2, 64), gradient(kRows, kCols * 2, 64), first(kRows, kCols * 4, 64), second(kRows, kCols * 4, 64);
        weight.filled(41);
        gradient.filled(43);
        first.set(0);
        second.set(0);
        both(weight, [&](bool whole, int64_t rows) {
            const AdamWCut cut = adamw_cut(2, 4);
            AdamWParam param{};
            const Pair* tensors[kTensors] = {&weight, &first, &second, nullptr, nullptr};
            for (int i = 0; i < kGradient; ++i) param.address[i] = tensors[i] ? int64_t(tensors[i]->at(whole)) : 0;
            float count = 3.0f;
            param.step = int64_t(&count);
            param.rows = flat ? 1 : rows;
            param.cols = flat ? rows * kCols : kCols;
            const int64_t pieces = param.rows * ((param.cols + cut.columns - 1) / cut.columns);
            param.tiles = (pieces + cut.pieces - 1) / cut.pieces;
            param.dtypes = kType * 0x0101;
            param.walk = 1;
            for (auto& stride : param.stride) stride[0] = param.cols, stride[1] = 1;
            const int64_t address = int64_t(gradient.at(whole)), blocks = param.tiles;
            std::vector<int32_t> owners(static_cast<size_t>(blocks));
            std::vector<uint32_t> scalars(kScalarWords);
            std::vector<double> partials(size_t(kStats * blocks)), stats(kStats);
            const AdamWPart all{0, blocks, 0, blocks}, none{blocks, 0, blocks, 0};
            const auto* table = reinterpret_cast<const int64_t*>(&param);
            adamw_owners(table, 1, flat ? all : none, flat ? none : all, owners.data(), kQueue);
            const AdamWArguments arguments{table, &address, owners.data(), scalars.data(), partials.data(), stats.data(), 1, hyper, {}, nullptr, 0, 2, 4};
            masked_adamw(arguments, flat ? all : none, flat ? none : all, AdamWOptions{nullptr, nullptr, false, false, false, true, false}, kQueue);
        });
        const std::string what = flat ? "flat" : "matrix";
        weight.check("weight, " + what);
        first.check("first moment, " + what);
        second.check("second moment, " + what);
    }
}

}  // namespace
