// pack and decompress: every kernel, on tensors that end where their memory ends.
#include "../../core/bitpack.h"
#include "../../core/rank.h"
#include "../../core/threshold.h"
#include "../../core/transposable.h"
#include "../../cuda/packing.h"
#include "emulated.h"

using namespace nm_test;

namespace {

struct Case {
    NM p;
    int64_t rows, cols;
    int dtype, out_dtype, select, layout;
    bool by_row, by_column, wide;

    std::string name() const {
        const char* ways[] = {"columns", "rows", "both"};
        std::string text = label(p, dtype, ways[by_row + (by_row && by_column)]) + (wide ? ", wide" : "");
        for (int64_t x : {rows, cols, int64_t(out_dtype), int64_t(select), int64_t(layout)}) text += ", " + std::to_string(x);
        return text;  // what is given, rows, columns, output, selection and layout
    }
};

// At most n of every m rows and columns that start at a multiple of m.
uint8_t given(NM p, int64_t row, int64_t col) { return uint8_t((row * 3 + col) % p.m < p.n && (row * 7 + col * 5) % 4 != 0); }

template <class In, class Out>
Out value_of(In x, bool kept, int select, float t, const float* scale) {
    if (!kept) return Out{};
    if (select != nm::cuda::kThreshold) {
        if constexpr (std::is_same_v<In, Out>) return x;
        return nm::from_float<Out>(nm::to_float(x));
    }
    return nm::from_float<Out>(nm::to_float(nm::shrink(x, t)) * (scale ? *scale : 1.0f));
}

struct Operand {
    Buffer values, indices;
};

// The place of byte `byte` of the indices of a line in a layout, where a line has so many bytes.
int64_t byte_at(int layout, int64_t line, int64_t byte, int64_t bytes) {
    if (layout == nm::cuda::kCanonical) return line * bytes + byte;
    const int64_t tile = line / 16, lane = line % 8 * 4 + byte % 8 / 2, across = bytes / 8, column = byte / 8;
    const int64_t words = layout == nm::cuda::kMmaSp ? tile * across + column : (tile / 4 * across + column) * 4 + tile % 4;
    return (words * 32 + lane) * 4 + line % 16 / 8 * 2 + byte % 2;
}

// Line by line, group by group. `step`: between elements of a group, `line_step`: between lines.
template <class In, class Out>
void pack_by_loops(const Case& c, const In* w, const uint8_t* mask, const float* scale, int64_t lines, int64_t length, int64_t line_step,
                   int64_t step, Operand& to) {
    const int bits = nm::index_bits(c.p.m);
    const int64_t bytes = nm::index_bytes(length / c.p.m * c.p.n, bits);
    std::memset(to.indices.data(), 0, to.indices.bytes());
    for (int64_t line = 0; line < lines; ++line) {
        for (int64_t group = 0; group < length / c.p.m; ++group) {
            const int64_t first = line * line_step + group * c.p.m * step;
            uint32_t keys[nm::kMaxM];
            uint8_t keep[nm::kMaxM], positions[nm::kMaxM];
            In x[nm::kMaxM], kept[nm::kMaxM];
            for (int i = 0; i < c.p.m; ++i) {
                x[i] = w[first + i * step];
                keys[i] = nm::Key<In>::of(x[i]);
                keep[i] = mask ? mask[first + i * step] : uint8_t(0);
            }
            if (!mask) nm::mask_group(keys, c.p.n, c.p.m, nm::Key<In>::bits, keep);
            const float t = c.p.n < c.p.m ? nm::Key<In>::value(nm::threshold_key(keys, c.p.n, c.p.m, nm::Key<In>::bits)) : 0.0f;
            nm::compact_group(x, keep, c.p.n, c.p.m, kept, positions);
            for (int k = 0; k < c.p.n; ++k) {
                const int64_t at = group * c.p.n + k;
                to.values.as<Out>()[line * (length / c.p.m * c.p.n) + at] =
                    value_of<In, Out>(kept[k], keep[positions[k]] != 0, c.select, t, scale);
                uint8_t& byte = to.indices.as<uint8_t>()[byte_at(c.layout, line, at * bits / 8, bytes)];
                byte = uint8_t(byte | positions[k] << (at * bits % 8));
            }
        }
    }
}

Operand operand(const Case& c, int64_t lines, int64_t length) {
    const int64_t kept = length / c.p.m * c.p.n;
    return {place(lines * kept, size_of(c.out_dtype), c.wide), place(lines * nm::index_bytes(kept, nm::index_bits(c.p.m)), 1, c.wide)};
}

template <class In, class Out>
void check(const Case& c) {
    const Buffer w = placed(numbers(c.rows * c.cols, c.dtype, uint64_t(c.rows + 3 * c.cols), true), c.wide, size_of(c.dtype));
    Buffer mask = place(c.rows * c.cols, 1, c.wide), scale = place(1, 4, c.wide), overfull = place(1, 4, c.wide);
    *scale.as<float>() = -1.37f;
    *overfull.as<int>() = 0;
    for (int64_t i = 0; i < c.rows * c.cols; ++i) {
        const int64_t row = i / c.cols, col = i % c.cols;
        mask.as<uint8_t>()[i] = given(c.p, row, col);
        if (c.select != nm::cuda::kTransposable) continue;
        float tile[16];
        for (int j = 0; j < 16; ++j) tile[j] = nm::to_float(w.as<In>()[(row / 4 * 4 + j / 4) * c.cols + col / 4 * 4 + j % 4]);
        mask.as<uint8_t>()[i] = uint8_t(nm::transposable_2_4(tile) >> (4 * (row % 4) + col % 4) & 1u);
    }
    const bool masked = c.select == nm::cuda::kGiven || c.select == nm::cuda::kTransposable;
    const uint8_t* const kept = masked ? mask.as<uint8_t>() : nullptr;
    Operand rows = operand(c, c.rows, c.cols), columns = operand(c, c.cols, c.rows), rows_expected = operand(c, c.rows, c.cols),
            columns_expected = operand(c, c.cols, c.rows);
    const bool done = nm::cuda::pack({w.data(), c.select == nm::cuda::kGiven ? kept : nullptr, scale.as<float>(), overfull.as<int>(),
                                      {c.by_row ? rows.values.data() : nullptr, rows.indices.data()},
                                      {c.by_column ? columns.values.data() : nullptr, columns.indices.data()},
                                      c.rows, c.cols, c.p.n, c.p.m, c.dtype, c.out_dtype, c.select, c.layout}, kQueue);
    CHECK(done) << c.name();
    CHECK(*overfull.as<int>() == 0) << c.name();
    if (c.by_row) {
        pack_by_loops<In, Out>(c, w.as<In>(), kept, scale.as<float>(), c.rows, c.cols, c.cols, 1, rows_expected);
        CHECK(same_numbers(rows.values, rows_expected.values, c.out_dtype)) << c.name();
        CHECK(rows.indices == rows_expected.indices) << c.name();
    }
    if (c.by_column) {
        pack_by_loops<In, Out>(c, w.as<In>(), kept, scale.as<float>(), c.cols, c.rows, 1, c.cols, columns_expected);
        CHECK(same_numbers(columns.values, columns_expected.values, c.out_dtype)) << c.name();
        CHECK(columns.indices == columns_expected.indices) << c.name();
    }
}

void check_dtypes(Case c) {
    for (int dtype : kDtypes) {
        for (int out : kDtypes) {
            const bool tiled = c.layout != nm::cuda::kCanonical || c.select == nm::cuda::kTransposable;
            if (c.layout != nm::cuda::kCanonical && out == nm::kFloat32) continue;
            if (!c.wide && dtype != out) continue;  // the same kernel as where it is wide
            if (dtype != nm::kFloat32 && out != dtype && tiled) continue;
            c.dtype = dtype;
            c.out_dtype = out;
            nm::by_dtype(dtype, [&](auto in) { nm::by_dtype(out, [&](auto to) { check<decltype(in), decltype(to)>(c); }); });
        }
    }
}

TEST(emulated_pack_agrees_with_loops) {
    using namespace nm::cuda;
    for (NM p : patterns()) {
        for (Size size : {Size{1, 1}, Size{3, 5}, Size{2, 32}, Size{32, 3}}) {
            // rows are m at least, where groups run along them
            const int64_t cols = size.groups * p.m, tall = size.rows * p.m;
            if (tall * cols > 12000) continue;
            for (int select : {kMagnitude, kGiven, kThreshold}) {
                for (bool wide : {false, true}) {
                    check_dtypes({p, size.rows, cols, 0, 0, select, kCanonical, true, false, wide});
                    check_dtypes({p, tall, size.groups + 7, 0, 0, select, kCanonical, false, true, wide});
                    if (select == kGiven) check_dtypes({p, tall, cols, 0, 0, select, kCanonical, true, true, wide});
                }
            }
        }
    }
}

TEST(emulated_pack_of_tiles_agrees_with_loops) {
    using namespace nm::cuda;
    for (int select : {kMagnitude, kGiven, kThreshold, kTransposable}) {
        const bool both = select == kTransposable || select == kGiven;
        for (Size size : {Size{32, 32}, Size{160, 96}}) {
            check_dtypes({{2, 4}, size.rows, size.groups, 0, 0, select, kCanonical, false, true, true});
            if (select == kTransposable) check_dtypes({{2, 4}, size.rows, size.groups, 0, 0, select, kCanonical, true, false, true});
            if (both) check_dtypes({{2, 4}, size.rows, size.groups, 0, 0, select, kCanonical, true, true, true});
        }
        for (int layout : {kMmaSp, kWgmmaSp}) {
            const int64_t lines = layout == kMmaSp ? 48 : 64;
            check_dtypes({{2, 4}, lines, 192, 0, 0, select, layout, true, false, true});
            check_dtypes({{2, 4}, 192, lines, 0, 0, select, layout, false, true, true});
            if (both) check_dtypes({{2, 4}, 64, 192, 0, 0, select, layout, true, true, true});
        }
    }
    for (NM p : {NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{1, 16}}) {
        for (int select : {kMagnitude, kGiven}) check_dtypes({p, 40 * p.m, 72, 0, 0, select, kCanonical, false, true, true});
    }
}

TEST(emulated_decompress_leaves_out_what_is_outside) {
    each_placed_case([](NM p, int dtype, int64_t groups, bool wide) {
        const int bits = nm::index_bits(p.m), size = size_of(dtype);
        for (int64_t rows : {int64_t(1), int64_t(3)}) {
            for (int64_t cut : {int64_t(0), int64_t(p.m - 1)}) {
                const int64_t cols = groups * p.m - cut, bytes = nm::index_bytes(groups * p.n, bits);
                const Buffer values = placed(numbers(rows * groups * p.n, dtype, uint64_t(groups), false), wide, size);
                Buffer indices = place(rows * bytes, 1, wide);
                Buffer out = place(rows * cols, size, wide), expected = place(rows * cols, size, wide);
                std::memset(expected.data(), 0, expected.bytes());
                std::memset(indices.data(), 0, indices.bytes());
                for (int64_t i = 0; i < rows * groups * p.n; ++i) {
                    // in order in each group, the last one now and then past its end
                    const int64_t row = i / (groups * p.n), at = i % (groups * p.n), group = at / p.n;
                    const int k = int(at % p.n), most = (1 << bits) - 1, place = k == p.n - 1 && group % 3 == 1 ? most : k;
                    nm::put_index(indices.as<uint8_t>() + row * bytes, at, bits, place);
                    if (place < p.m && group * p.m + place < cols) {
                        const int64_t to = row * cols + group * p.m + place;
                        std::memcpy(expected.as<char>() + to * size, values.as<char>() + i * size, size_t(size));
                    }
                }
                nm::cuda::decompress(values.data(), indices.data(), dtype, rows, cols, p.n, p.m, out.data(), kQueue);
                CHECK(out == expected) << label(p, dtype, wide ? "wide" : "") << ", " << rows << " x " << cols;
            }
        }
    });
}

}  // namespace
