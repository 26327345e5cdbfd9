// The step that also writes the forms of the new weights, and their check, against the step and the packing as two calls. Every tensor
// ends where its memory does.
#include <cmath>

#include "../../cuda/adamw_pack.h"
#include "../../cuda/packing.h"
#include "emulated.h"

using namespace nm_test;
using namespace nm::cuda;

namespace {

const double kHyper[8] = {0.01, 0.9, 0.999, 1e-8, 0.1, 2e-4, 5.0, 0.5};
const float kScale = 1.0625f;

struct Case {
    int select, layout, gradient;
    bool columns, dense, edges, general;

    std::string name() const {
        std::string text = "select, layout, gradient, columns, dense, edges, general:";
        for (int x : {select, layout, gradient, int(columns), int(dense), int(edges), int(general)}) text += " " + std::to_string(x);
        return text;
    }
};

Buffer room(int64_t count, int size) { return place(count, size, true); }

struct Weight {
    Weight(const Case& c, int64_t rows, int64_t cols, uint64_t seed)
        : rows(rows), cols(cols), w(numbers(rows * cols, nm::kFloat32, seed, c.edges)), first(numbers(rows * cols, nm::kFloat32, seed + 1, false)),
          second(numbers(rows * cols, nm::kFloat32, seed + 2, false)), gradient(numbers(rows * cols, c.gradient, seed + 3, c.edges)),
          bits(room(rows * cols / 8, 1)), values(room(rows * cols / 2, 2)), indices(room(rows * cols / 8, 1)), values_t(room(rows * cols / 2, 2)),
          indices_t(room(rows * cols / 8, 1)), dense(room(rows * cols, 2)) {
        w = placed(w, true, 4);
        first = placed(first, true, 4);
        second = placed(second, true, 4);
        gradient = placed(gradient, true, size_of(c.gradient));
        for (int64_t i = 0; i < rows * cols; ++i) second.as<float>()[i] *= second.as<float>()[i];
        std::memset(bits.data(), 0, bits.bytes());
        for (int64_t i = 0; i < rows * cols; ++i) {
            if (kept(i / cols, i % cols)) bits.as<uint8_t>()[i / 8] |= uint8_t(1 << i % 8);
        }
    }

    // Two of each four along rows and columns, in some tiles fewer.
    static bool kept(int64_t row, int64_t col) { return (row + col + row / 4) % 4 < 2 && ((row / 4 + col / 4) % 3 || (row + 3 * col) % 5); }

    AdamWForms forms(const Case& c) const {
        AdamWForms to{{values.data(), indices.data()}, {}, nullptr, c.select == kThreshold ? &kScale : nullptr};
        if (c.columns) to.by_column = {values_t.data(), indices_t.data()};
        if (c.dense) to.dense = dense.data();
        return to;
    }

    // Makes them by the packing kernel.
    bool pack_forms(const Case& c) const {
        std::vector<uint8_t> mask(size_t(rows * cols));
        for (int64_t i = 0; i < rows * cols; ++i) mask[size_t(i)] = kept(i / cols, i % cols);
        const Buffer flags = room(rows * cols, 1);
        std::memcpy(flags.data(), mask.data(), mask.size());
        int overfull = 0;
        const AdamWForms to = forms(c);
        Pack call{w.data(), c.select == kGiven ? flags.as<uint8_t>() : nullptr, to.scale, &overfull, to.by_row, to.by_column, rows, cols, 2, 4,
                  nm::kFloat32, nm::kBFloat16, c.select, c.layout, to.dense};
        return pack(call, kQueue) && !overfull;
    }

    int64_t rows, cols;
    Buffer w, first, second, gradient, bits, values, indices, values_t, indices_t, dense;
};

struct Step {
    explicit Step(const Case& c) : call(c) {
        weights.reserve(3);
        weights.emplace_back(c, 64, 64, 1);
        weights.emplace_back(c, 128, 192, 11);
        weights.emplace_back(c, 192, 64, 21);
    }

    struct Table {
        std::vector<AdamWParam> params;
        std::vector<int64_t> gradients;
        std::vector<AdamWForms> forms;
        std::vector<int32_t> owners;
        float counts[3] = {3.0f, 4.0f, 3.0f};
        int64_t tiles = 0;

        const int64_t* words() const { return reinterpret_cast<const int64_t*>(params.data()); }
        AdamWPart all() const { return {0, tiles, 0, tiles}; }
    };

    void fill(Table& t, const AdamWCut& cut) const {
        for (const Weight& weight : weights) {
            AdamWParam param{};
            param.address[kWeight] = int64_t(weight.w.data());
            param.address[kFirst] = int64_t(weight.first.data());
            param.address[kSecond] = int64_t(weight.second.data());
            param.mask = call.select == kGiven ? int64_t(weight.bits.data()) : 0;
            param.index = int64_t(t.params.size());
            param.step = int64_t(t.counts + param.index);
            param.rows = weight.rows;
            param.cols = weight.cols;
            const int64_t pieces = param.rows * ((param.cols + cut.columns - 1) / cut.columns);
            param.first = t.tiles;
            param.tiles = (pieces + cut.pieces - 1) / cut.pieces;
            param.dtypes = nm::kFloat32 | call.gradient << 8;
            param.walk = 1;
            for (auto& stride : param.stride) {
                stride[0] = param.cols;
                stride[1] = 1;
            }
            t.tiles += param.tiles;
            t.params.push_back(param);
            t.gradients.push_back(int64_t(weight.gradient.data()));
            t.forms.push_back(weight.forms(call));
        }
        t.owners.resize(static_cast<size_t>(t.tiles));
        adamw_owners(t.words(), int64_t(t.params.size()), {0, 0, 0, 0}, t.all(), t.owners.data(), kQueue);
    }

    // The forms of all weights in one launch; `kept`: the indices stay.
    void pack(bool kept) const {
        Table t;
        fill(t, {kPackTile, kPackTile, false});
        for (AdamWForms& to : t.forms) {
            if (kept) to.by_row.indices = to.by_column.indices = nullptr;
        }
        pack_forms(t.words(), t.owners.data(), t.tiles, {t.forms.data(), call.select, call.layout, 0, call.columns, call.dense}, kQueue);
    }

    void run(bool packs, std::vector<double>& stats) {
        Table t;
        fill(t, packs ? AdamWCut{kPackTile, kPackTile, false} : adamw_cut(call.select == kGiven ? 0 : 2, call.select == kGiven ? 0 : 4));
        std::vector<uint32_t> scalars(kScalarWords * t.params.size());
        std::vector<double> partials(size_t(kStats * t.tiles));
        const bool held = call.select == kGiven;
        const int n = held ? 0 : 2, m = held ? 0 : 4;
        AdamWArguments a{t.words(), t.gradients.data(), t.owners.data(), scalars.data(), partials.data(), stats.data(), int64_t(t.params.size()),
                         kHyper, {}, nullptr, 0, n, m};
        const float scale = 3.0f, found = 0.0f;
        AdamWOptions options{nullptr, nullptr, false, false, false, false, false, held, false};
        if (call.general) options = {&scale, &found, call.dense, true, true, false, false, held, false};
        if (packs) {
            masked_adamw_pack(a, t.all(), options, {t.forms.data(), call.select, call.layout, call.gradient, call.columns, call.dense}, kQueue);
        } else {
            masked_adamw(a, {0, 0, 0, 0}, t.all(), options, kQueue);
        }
        CHECK(t.counts[1] == 5.0f) << call.name();
    }

    Case call;
    std::vector<Weight> weights;
};

void compare(const Weight& got, const Weight& want, const Case& c, const char* what) {
    const std::string name = std::string(what) + ", " + std::to_string(got.rows) + " x " + std::to_string(got.cols) + ", " + c.name();
    CHECK(same_numbers(got.w, want.w, nm::kFloat32)) << name << ": weight";
    CHECK(same_numbers(got.first, want.first, nm::kFloat32)) << name << ": first moment";
    CHECK(same_numbers(got.second, want.second, nm::kFloat32)) << name << ": second moment";
    CHECK(same_numbers(got.values, want.values, nm::kBFloat16)) << name << ": values";
    CHECK(got.indices == want.indices) << name << ": indices";
    CHECK(same_numbers(got.values_t, want.values_t, nm::kBFloat16)) << name << ": values of the transpose";
    CHECK(got.indices_t == want.indices_t) << name << ": indices of the transpose";
    CHECK(same_numbers(got.dense, want.dense, nm::kBFloat16)) << name << ": dense";
}

// A weight that has changed where the strip is, and one that has changed elsewhere.
void check_renewal(const Step& got, const Case& c) {
    for (const Weight& weight : got.weights) {
        for (bool seen : {false, true}) {
            float* const w = weight.w.as<float>();
            w[weight.cols * 17 + 5] = 1e30f;
            w[weight.cols * 17 + 6] = -1e31f;
            Buffer before(int64_t(weight.values.bytes()) / 2, 2);
            std::memcpy(before.data(), weight.values.data(), before.bytes());
            const Buffer changed = room(1, 4);
            *changed.as<int>() = 7;
            const FormsCall call{weight.w.as<float>(), weight.bits.as<uint8_t>(), weight.forms(c), weight.rows, weight.cols, c.select, c.layout};
            renew_changed_forms(call, seen ? 17 : 16, changed.as<int>(), 8, kQueue);
            const bool kept = c.select != kGiven || Weight::kept(17, 5) || Weight::kept(17, 6);
            CHECK(*changed.as<int>() == (seen && kept ? 8 : 7)) << c.name();
            if (!seen) CHECK(std::memcmp(before.data(), weight.values.data(), before.bytes()) == 0) << c.name();
        }
        Weight want(c, weight.rows, weight.cols, 1);
        std::memcpy(want.w.data(), weight.w.data(), weight.w.bytes());
        std::memcpy(want.first.data(), weight.first.data(), weight.first.bytes());
        std::memcpy(want.second.data(), weight.second.data(), weight.second.bytes());
        CHECK(want.pack_forms(c)) << c.name();
        compare(weight, want, c, "renewed");
    }
}

// All weights in one launch; then other weights with the indices left, which only a held mask allows.
void check_packing(const Case& c) {
    Step got(c), want(c);
    for (bool kept : {false, true}) {
        if (kept && c.select != kGiven) continue;
        for (size_t i = 0; i < 3; ++i) {
            if (kept) {
                for (const Weight* weight : {&got.weights[i], &want.weights[i]}) weight->w.as<float>()[65] = 3.5f;
            }
            CHECK(want.weights[i].pack_forms(c)) << c.name();
        }
        got.pack(kept);
        for (size_t i = 0; i < 3; ++i) compare(got.weights[i], want.weights[i], c, kept ? "packed, indices kept" : "packed");
    }
}

void check(const Case& c) {
    Step got(c), want(c);
    std::vector<double> stats(kStats), expected(kStats);
    got.run(true, stats);
    want.run(false, expected);
    for (size_t i = 0; i < 3; ++i) {
        CHECK(want.weights[i].pack_forms(c)) << c.name();
        compare(got.weights[i], want.weights[i], c, "stepped");
    }
    for (int k = 0; k < kStats && !c.edges; ++k) CHECK(std::abs(stats[size_t(k)] - expected[size_t(k)]) <= 1e-12 * std::abs(expected[size_t(k)])) << c.name();
    check_renewal(got, c);
    check_packing(c);
}

TEST(emulated_adamw_pack_is_a_step_and_a_packing) {
    for (int select : {int(kMagnitude), int(kThreshold), int(kGiven)}) {
        for (bool back : {false, true}) {
            const bool columns = back && select == kGiven, dense = back && select != kGiven;
            for (int gradient : {int(nm::kFloat32), int(nm::kBFloat16)}) {
                for (bool general : {false, true}) {
                    for (int layout : {int(kCanonical), int(kMmaSp), int(kWgmmaSp)}) {
                        if (layout == kWgmmaSp || !general) check({select, layout, gradient, columns, dense, layout == kMmaSp || general, general});
                    }
                }
            }
        }
    }
}

}  // namespace
