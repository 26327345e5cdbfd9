// masked_adamw: parameters, states and statistics have the same bits under every instruction set, NaNs apart.
#include <array>
#include <utility>

#include "check.h"

using namespace nm_test;

namespace {

enum Tensor { kP, kGrad, kAvg, kSq, kTop, kTensors };

struct Options {
    bool masks, frozen, eps_inside, maximize, geometric, amsgrad, transposed;
    bool held = false, fixed = false;
};

int type_of(int tensor, int dtype) { return tensor == kP || tensor == kGrad ? dtype : nm::kFloat32; }

struct Result {
    std::vector<Buffer> tensors;
    std::array<double, 9> stats{};
};

Result one_step(NM p, int dtype, int64_t rows, int64_t cols, Options o, bool edge_cases, int threads) {
    const float scale = 2.0f, skip = 0.0f;
    const double hyper[9] = {0.01, 0.9, 0.999, 1e-8, 0.1, 2e-4, 5.0, 2.0, 0.0};
    Result result;
    nm::AdamWParam param;
    float step = 3.0f;
    param.rows = rows;
    param.cols = cols;
    param.step = &step;
    nm::View* views[kTensors] = {&param.p, &param.grad, &param.avg, &param.sq, &param.top};
    for (int i = 0; i < kTensors; ++i) {
        const int type = type_of(i, dtype);
        result.tensors.push_back(numbers(rows * cols, type, uint64_t(40 + i), edge_cases && i < kAvg));
        if (i == kSq || i == kTop) {
            for (int64_t k = 0; k < rows * cols; ++k) result.tensors.back().as<float>()[k] *= result.tensors.back().as<float>()[k];
        }
        if (i == kTop && !o.amsgrad) continue;
        *views[i] = o.transposed ? nm::View{result.tensors.back().data(), type, 1, rows} : nm::View{result.tensors.back().data(), type, cols, 1};
    }
    Buffer bits(rows * ((cols + 7) / 8), 1);
    for (size_t i = 0; i < bits.bytes(); ++i) bits.as<uint8_t>()[i] = uint8_t((i * 2654435761u) >> 13);
    if (o.held) param.mask = bits.as<uint8_t>();
    const bool by_pattern = o.masks && !o.held;
    const nm::AdamWCall call{hyper, by_pattern ? p.n : 0, by_pattern ? p.m : 0, o.frozen, o.eps_inside, o.maximize, o.geometric,
                             o.held, o.fixed, &scale, &skip};
    nm::kernels().masked_adamw({param}, call, result.stats.data(), threads);
    return result;
}

void agree(NM p, int dtype, int64_t rows, int64_t cols, Options o, int options) {
    Result expected;
    each_isa([&](const std::string& isa) {
        for (int threads : {1, 3}) {
            Result got = one_step(p, dtype, rows, cols, o, options % 3 == 0, threads);
            if (expected.tensors.empty()) expected = std::move(got);
            if (got.tensors.empty()) continue;
            for (size_t i = 0; i < got.tensors.size(); ++i) {
                CHECK(same_numbers(got.tensors[i], expected.tensors[i], type_of(int(i), dtype))) << label(p, dtype, isa) << ", options " << options << ", tensor " << i;
            }
            for (size_t i = 0; i < got.stats.size(); ++i) {
                const bool same = got.stats[i] == expected.stats[i] || (got.stats[i] != got.stats[i] && expected.stats[i] != expected.stats[i]);
                CHECK(same) << label(p, dtype, isa) << ", options " << options << ", statistic " << i;
            }
        }
    });
}

TEST(steps_agree) {
    for (NM p : {NM{2, 4}, NM{1, 4}, NM{2, 8}, NM{1, 8}, NM{4, 8}, NM{1, 16}, NM{1, 32}, NM{3, 5}, NM{5, 48}}) {
        for (int dtype : kDtypes) {
            for (int options = 0; options < 128; options += 11) {
                const Options o{(options & 1) == 0, (options & 2) != 0, (options & 4) != 0, (options & 8) != 0,
                                (options & 16) != 0, (options & 32) != 0, (options & 64) != 0};
                for (Size size : {Size{1, 1}, Size{3, 17}, Size{17, 33}, Size{1, 700}}) {
                    agree(p, dtype, size.rows, size.groups * p.m, o, options);
                }
            }
        }
    }
}

TEST(steps_with_held_masks_agree) {
    for (int dtype : kDtypes) {
        for (int options = 0; options < 128; options += 11) {
            for (bool fixed : {false, true}) {
                const Options o{true, (options & 2) != 0, (options & 4) != 0, (options & 8) != 0, (options & 16) != 0, (options & 32) != 0,
                                (options & 64) != 0, true, fixed};
                for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {3, 68}, {17, 13}, {33, 64}, {2, 4200}}) {
                    agree({0, 0}, dtype, rows, cols, o, options);
                }
            }
        }
    }
}

}  // namespace
