// MaskedAdamW: tables, cuts and kernels, with every tensor ending where its memory does.
#include <utility>

#include "../../core/rank.h"
#include "../../cuda/adamw_table.h"
#include "emulated.h"

using namespace nm_test;
using namespace nm::cuda;

namespace {

// One call of one param, (rows, cols) in memory as it is or transposed.
struct Call {
    NM p;
    int dtype;
    int64_t rows, cols;
    bool wide, transposed;
    bool held = false, fixed = false;
};

const double kHyper[8] = {0.01, 0.9, 0.999, 1e-8, 0.1, 2e-4, 0.0, 0.0};

struct Step {
    Step(const Call& c) : call(c), weight(of(c.dtype, 1)), first(of(nm::kFloat32, 2)), second(of(nm::kFloat32, 3)), gradient(of(c.dtype, 4)), bits(c.rows * ((c.cols + 7) / 8), 1) {
        for (size_t i = 0; i < bits.bytes(); ++i) bits.as<uint8_t>()[i] = uint8_t((i * 2654435761u) >> 13);
        for (int64_t i = 0; i < c.rows * c.cols; ++i) second.as<float>()[i] *= second.as<float>()[i];
    }

    Buffer of(int dtype, uint64_t seed) const {
        return placed(numbers(call.rows * call.cols, dtype, seed, dtype != nm::kFloat32 || seed == 1), call.wide, size_of(dtype));
    }
    int64_t at(int64_t row, int64_t col) const { return call.transposed ? col * call.rows + row : row * call.cols + col; }

    void emulated(float& count) {
        const Call& c = call;
        const AdamWCut cut = adamw_cut(c.p.n, c.p.m);
        const bool row = !c.transposed && !(c.held && c.cols % 8);  // seen as one
        const bool flat = cut.flat && row && c.wide && c.rows * c.cols % 4 == 0;
        AdamWParam param{};
        const Buffer* buffers[kTensors] = {&weight, &first, &second, nullptr, nullptr};
        for (int i = 0; i < kGradient; ++i) param.address[i] = buffers[i] ? int64_t(buffers[i]->data()) : 0;
        param.step = int64_t(&count);
        param.mask = c.held ? int64_t(bits.data()) : 0;
        param.rows = row ? 1 : c.rows;
        param.cols = row ? c.rows * c.cols : c.cols;
        const int64_t pieces = param.rows * ((param.cols + cut.columns - 1) / cut.columns);
        param.tiles = (pieces + cut.pieces - 1) / cut.pieces;
        param.dtypes = c.dtype | c.dtype << 8;
        param.walk = (c.wide && !c.transposed && c.cols % 4 == 0) | c.transposed << 1;
        for (auto& stride : param.stride) {
            stride[0] = c.transposed ? 1 : param.cols;
            stride[1] = c.transposed ? c.rows : 1;
        }
        const int64_t address = int64_t(gradient.data()), tiles = param.tiles, blocks = tiles < 3 ? tiles : 3;
        std::vector<int32_t> owners(static_cast<size_t>(blocks));
        std::vector<uint32_t> scalars(kScalarWords);
        std::vector<double> partials(size_t(kStats * blocks)), stats(kStats);
        const AdamWPart all{0, tiles, 0, blocks}, none{tiles, 0, blocks, 0};
        const auto* table = reinterpret_cast<const int64_t*>(&param);
        adamw_owners(table, 1, flat ? all : none, flat ? none : all, owners.data(), kQueue);
        AdamWArguments arguments{table, &address, owners.data(), scalars.data(), partials.data(), stats.data(), 1, kHyper, {}, nullptr, 0, c.p.n, c.p.m};
        masked_adamw(arguments, flat ? all : none, flat ? none : all, AdamWOptions{nullptr, nullptr, false, false, false, true, false, c.held, c.fixed}, kQueue);
        CHECK(stats[kApplied] == 1.0 && count == 4.0f);
    }

    // The mask of the weights, row-major.
    std::vector<uint8_t> mask() const {
        std::vector<uint8_t> keep(size_t(call.rows * call.cols), 1);
        for (int64_t i = 0; i < call.rows * call.cols && call.held; ++i) {
            const int64_t row = i / call.cols, col = i % call.cols;
            keep[size_t(i)] = bits.as<uint8_t>()[row * ((call.cols + 7) / 8) + col / 8] >> (col % 8) & 1;
        }
        for (int64_t row = 0; row < call.rows && call.p.m; ++row) {
            for (int64_t col = 0; col < call.cols; col += call.p.m) {
                uint32_t keys[nm::kMaxM];
                for (int i = 0; i < call.p.m; ++i) keys[i] = nm::Key<float>::of(float(number(weight, call.dtype, at(row, col + i))));
                nm::mask_group(keys, call.p.n, call.p.m, nm::Key<float>::bits, keep.data() + row * call.cols + col);
            }
        }
        return keep;
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
                    const bool pruned = !before[size_t(row * call.cols + col)];
                    if (pruned) g = call.fixed ? 0.0f : g + (s.decay * p);
                    float& m = first.as<float>()[i];
                    float& v = second.as<float>()[i];
                    m = nm::adamw_first(s, m, g);
                    v = nm::adamw_second(s, v, g);
                    const float next = nm::adamw_apply(s, p, nm::adamw_update(s, m, v));
                    weight.as<T>()[i] = nm::from_float<T>(pruned && call.fixed ? 0.0f : next);
                }
            }
        });
    }

    Call call;
    Buffer weight, first, second, gradient, bits;
};

void check(const Call& call) {
    Step got(call), expected(call);
    float count = 3.0f;
    got.emulated(count);
    expected.by_loops();
    const std::string what =
        " of " + std::to_string(call.rows) + " x " + std::to_string(call.cols) + (call.wide ? ", wide" : "") + (call.transposed ? ", transposed" : "");
    const auto named = [&](const char* name) { return label(call.p, call.dtype, name) + what; };
    CHECK(same_numbers(got.weight, expected.weight, call.dtype)) << named("weight");
    CHECK(same_numbers(got.first, expected.first, nm::kFloat32)) << named("first moment");
    CHECK(same_numbers(got.second, expected.second, nm::kFloat32)) << named("second moment");
}

TEST(emulated_adamw_agrees_with_loops) {
    for (NM p : {NM{0, 0}, NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{1, 16}, NM{3, 5}, NM{5, 48}}) {
        for (int dtype : kDtypes) {
            for (Size size : {Size{1, 1}, Size{3, 7}, Size{37, 33}, Size{1, 1031}}) {
                const int64_t cols = size.groups * (p.m ? p.m : 3);
                if (size.rows * cols > 12000) continue;
                for (int kind = 0; kind < 3; ++kind) check({p, dtype, size.rows, cols, kind > 0, kind == 2});
            }
        }
    }
}

TEST(emulated_adamw_with_held_masks_agrees_with_loops) {
    for (int dtype : kDtypes) {
        for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {3, 8}, {5, 13}, {37, 40}, {3, 1031}, {2, 4104}}) {
            for (int kind = 0; kind < 3; ++kind) {
                for (bool fixed : {false, true}) check({{0, 0}, dtype, rows, cols, kind > 0, kind == 2, true, fixed});
            }
        }
    }
}

}  // namespace
