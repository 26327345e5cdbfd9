// MaskedAdamW: tables, cuts and kernels, with every tensor ending where its memory does.
#include "../../core/bitpack.h"
#include "../../core/rank.h"
#include "../../core/transposable.h"
#include "../../cuda/adamw_table.h"
#include "emulated.h"

using namespace nm_test;
using namespace nm::cuda;

namespace {

// One call of one param, (rows, cols) in memory as it is or transposed.
struct Call {
    NM p;
    int dtype, out_dtype;
    int64_t rows, cols;
    bool wide, transposed, squares, transposable;
    int layout;
};

const double kHyper[8] = {0.01, 0.9, 0.999, 1e-8, 0.1, 2e-4, 0.0, 0.0};

struct Step {
    Step(const Call& c)
        : call(c), weight(of(c.dtype, 1)), first(of(nm::kFloat32, 2)), second(of(nm::kFloat32, 3)), out(place(c.rows * c.cols, size_of(c.out_dtype), c.wide)),
          gradient(of(c.dtype, 4)), values(place(c.rows * c.cols / 2, 2, true)), indices(index_bytes(c.rows, c.cols), 1, 0),
          values_t(place(c.rows * c.cols / 2, 2, true)), indices_t(index_bytes(c.cols, c.rows), 1, 0) {
        for (int64_t i = 0; i < c.rows * c.cols; ++i) second.as<float>()[i] *= second.as<float>()[i];
    }

    Buffer of(int dtype, uint64_t seed) const {
        return placed(numbers(call.rows * call.cols, dtype, seed, dtype != nm::kFloat32 || seed == 1), call.wide, size_of(dtype));
    }
    int64_t index_bytes(int64_t lines, int64_t length) const { return call.layout ? lines * length / 8 : lines * ((length + 7) / 8); }
    int64_t at(int64_t row, int64_t col) const { return call.transposed ? col * call.rows + row : row * call.cols + col; }

    void emulated(float& count) {
        const Call& c = call;
        const AdamWCut cut = adamw_cut(c.p.n, c.p.m, c.squares);
        const bool flat = cut.flat && !c.transposed && c.wide && c.rows * c.cols % 4 == 0;
        AdamWParam param{};
        const Buffer* buffers[kTensors] = {&weight, &first, &second, nullptr, &out, nullptr};
        for (int i = 0; i < kGradient; ++i) param.address[i] = buffers[i] ? int64_t(buffers[i]->data()) : 0;
        param.step = int64_t(&count);
        param.rows = c.transposed || c.squares ? c.rows : 1;
        param.cols = c.transposed || c.squares ? c.cols : c.rows * c.cols;
        const int64_t pieces = (param.rows + cut.rows - 1) / cut.rows * ((param.cols + cut.columns - 1) / cut.columns);
        param.tiles = (pieces + cut.pieces - 1) / cut.pieces;
        param.dtypes = c.dtype | c.dtype << 8 | c.out_dtype << 16;
        param.walk = (c.wide && !c.transposed && c.cols % 4 == 0) | c.transposed << 1;
        for (auto& stride : param.stride) {
            stride[0] = c.transposed ? 1 : param.cols;
            stride[1] = c.transposed ? c.rows : 1;
        }
        const AdamWPack pack{int64_t(values.data()), int64_t(indices.data()), int64_t(values_t.data()), int64_t(indices_t.data()), nm::kBFloat16 * 257};
        const int64_t address = int64_t(gradient.data()), tiles = param.tiles, blocks = tiles < 3 ? tiles : 3;
        std::vector<int32_t> owners(static_cast<size_t>(blocks));
        std::vector<uint32_t> scalars(kScalarWords);
        std::vector<double> partials(size_t(kStats * blocks)), stats(kStats);
        const AdamWPart all{0, tiles, 0, blocks}, none{tiles, 0, blocks, 0};
        const auto* table = reinterpret_cast<const int64_t*>(&param);
        adamw_owners(table, 1, flat ? all : none, flat ? none : all, owners.data(), kQueue);
        AdamWArguments arguments{table, &address, owners.data(), scalars.data(), partials.data(), stats.data(), 1, kHyper, {}, nullptr, 0, c.p.n, c.p.m,
                                 c.squares, c.transposable, c.squares ? reinterpret_cast<const int64_t*>(&pack) : nullptr, c.layout};
        masked_adamw(arguments, flat ? all : none, flat ? none : all, AdamWOptions{nullptr, nullptr, false, false, false, true, false}, kQueue);
        CHECK(stats[kApplied] == 1.0 && count == 4.0f);
    }

    // The mask of the weights, row-major.
    std::vector<uint8_t> mask() const {
        std::vector<uint8_t> keep(size_t(call.rows * call.cols), 1);
        const auto x = [&](int64_t row, int64_t col) { return float(number(weight, call.dtype, at(row, col))); };
        for (int64_t row = 0; row < call.rows && call.p.m; row += call.transposable ? 4 : 1) {
            for (int64_t col = 0; col < call.cols; col += call.p.m) {
                if (call.transposable) {
                    float tile[16];
                    for (int i = 0; i < 16; ++i) tile[i] = x(row + i / 4, col + i % 4);
                    const uint32_t bits = nm::transposable_2_4(tile);
                    for (int i = 0; i < 16; ++i) keep[size_t((row + i / 4) * call.cols + col + i % 4)] = bits >> i & 1;
                } else {
                    uint32_t keys[nm::kMaxM];
                    for (int i = 0; i < call.p.m; ++i) keys[i] = nm::Key<float>::of(x(row, col + i));
                    nm::mask_group(keys, call.p.n, call.p.m, nm::Key<float>::bits, keep.data() + row * call.cols + col);
                }
            }
        }
        return keep;
    }

    // The two kept of each four along one line, and their indices.
    void pack_by_loops(const std::vector<uint8_t>& keep, bool columns) {
        const int64_t lines = columns ? call.cols : call.rows, length = columns ? call.rows : call.cols;
        auto* to = (columns ? values_t : values).as<nm::bf16>();
        auto* bits = (columns ? indices_t : indices).as<uint8_t>();
        std::memset(bits, 0, (columns ? indices_t : indices).bytes());
        for (int64_t line = 0; line < lines; ++line) {
            int64_t kept = 0;
            for (int64_t i = 0; i < length; ++i) {
                const int64_t row = columns ? i : line, col = columns ? line : i;
                if (!keep[size_t(row * call.cols + col)]) continue;
                to[line * length / 2 + kept] = nm::from_float<nm::bf16>(float(number(weight, call.dtype, at(row, col))));
                int64_t byte = line * ((length + 7) / 8) + kept / 4;
                if (call.layout) {  // tiles of 16 lines and 64 elements, words of the lines r and r + 8
                    const int64_t r = line % 16, tile = call.layout == kMmaSpLayout ? line / 16 * (length / 64) + i / 64
                                                                                    : (line / 64 * (length / 64) + i / 64) * 4 + line / 16 % 4;
                    byte = (tile * 32 + r % 8 * 4 + i / 16 % 4) * 4 + r / 8 * 2 + i / 8 % 2;
                }
                bits[byte] |= uint8_t((i % 4) << (kept % 4 * 2));
                ++kept;
            }
        }
    }

    void by_loops() {
        const nm::AdamW s = nm::adamw_scalars(kHyper, 4, false, false, false);
        const std::vector<uint8_t> before = mask();
        nm::by_dtype(call.dtype, [&](auto tag) {
            using T = decltype(tag);
            for (int64_t row = 0; row < call.rows; ++row) {
                for (int64_t col = 0; col < call.cols; ++col) {
                    const int64_t i = at(row, col);
                    const float p = nm::to_float(weight.as<T>()[i]);
                    float g = nm::to_float(gradient.as<T>()[i]);
                    if (!before[size_t(row * call.cols + col)]) g = g + (s.decay * p);
                    float& m = first.as<float>()[i];
                    float& v = second.as<float>()[i];
                    m = nm::adamw_first(s, m, g);
                    v = nm::adamw_second(s, v, g);
                    weight.as<T>()[i] = nm::from_float<T>(nm::adamw_apply(s, p, nm::adamw_update(s, m, v)));
                }
            }
        });
        const std::vector<uint8_t> after = mask();
        nm::by_dtype(call.out_dtype, [&](auto tag) {
            using T = decltype(tag);
            for (int64_t row = 0; row < call.rows; ++row) {
                for (int64_t col = 0; col < call.cols; ++col) {
                    const float p = float(number(weight, call.dtype, at(row, col)));
                    out.as<T>()[at(row, col)] = nm::from_float<T>(after[size_t(row * call.cols + col)] ? p : 0.0f);
                }
            }
        });
        if (!call.squares) return;
        pack_by_loops(after, false);
        if (call.transposable) pack_by_loops(after, true);
    }

    Call call;
    Buffer weight, first, second, out, gradient, values, indices, values_t, indices_t;
};

void check(const Call& call) {
    Step got(call), expected(call);
    float count = 3.0f;
    got.emulated(count);
    expected.by_loops();
    const std::string what = " of " + std::to_string(call.rows) + " x " + std::to_string(call.cols) + (call.wide ? ", wide" : "") +
                             (call.transposed ? ", transposed" : "") + (call.transposable ? ", transposable" : "") + ", layout " + std::to_string(call.layout);
    const auto named = [&](const char* name) { return label(call.p, call.dtype, name) + what; };
    CHECK(same_numbers(got.weight, expected.weight, call.dtype)) << named("weight");
    CHECK(same_numbers(got.first, expected.first, nm::kFloat32)) << named("first moment");
    CHECK(same_numbers(got.second, expected.second, nm::kFloat32)) << named("second moment");
    CHECK(same_numbers(got.out, expected.out, call.out_dtype)) << named("out");
    CHECK(same_numbers(got.values, expected.values, nm::kBFloat16)) << named("values");
    CHECK(!call.squares || got.indices == expected.indices) << named("indices");
    CHECK(same_numbers(got.values_t, expected.values_t, nm::kBFloat16)) << named("values of the transpose");
    CHECK(!call.transposable || got.indices_t == expected.indices_t) << named("indices of the transpose");
}

TEST(emulated_adamw_agrees_with_loops) {
    for (NM p : {NM{0, 0}, NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{1, 16}, NM{3, 5}, NM{5, 48}}) {
        for (int dtype : kDtypes) {
            for (Size size : {Size{1, 1}, Size{3, 7}, Size{37, 33}, Size{1, 1031}}) {
                const int64_t cols = size.groups * (p.m ? p.m : 3);
                if (size.rows * cols > 12000) continue;
                for (int kind = 0; kind < 3; ++kind) check({p, dtype, nm::kBFloat16, size.rows, cols, kind > 0, kind == 2, false, false, 0});
            }
        }
    }
}

TEST(emulated_adamw_packs_as_loops_do) {
    for (int dtype : kDtypes) {
        for (Size size : {Size{4, 4}, Size{8, 12}, Size{20, 36}, Size{68, 132}}) {
            for (int kind = 0; kind < 6; ++kind) check({{2, 4}, dtype, nm::kFloat32, size.rows, size.groups, kind > 1, kind > 3, true, kind % 2 == 1, 0});
        }
        check({{2, 4}, dtype, nm::kFloat16, 7, 20, true, false, true, false, 0});
        for (int kind = 0; kind < 4; ++kind) check({{2, 4}, dtype, nm::kFloat16, 64, 128, true, false, true, kind % 2 == 1, 1 + kind / 2});
    }
}

}  // namespace
