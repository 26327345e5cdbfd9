// MaskedAdamW: one pass over each parameter and its state. A parameter is cut into tiles of about 4096 elements that
// depend on its shape and strides alone; their statistics are added in order, so that any number of threads gives the
// same bits. Inside a tile, blocks of at most 256 elements go through the steps of core/adamw.h in fp32 buffers.
#include "../../core/adamw.h"

#include <algorithm>
#include <cmath>

#include "../../core/rank.h"
#include "../kernels.h"

namespace nm {
namespace {

constexpr int kBlock = 256;      // elements worked on together, a whole number of groups
constexpr int64_t kTile = 4096;  // elements in one partial of the statistics
constexpr int kLine = 16;        // rows of a block whose neighbours in memory are rows: they fill a cache line

// The part of a parameter that one block works on; element (r, c) sits at r * cols + c of the block's buffers.
struct Window {
    int64_t row, col;
    int rows, cols;

    int count() const { return rows * cols; }
};

// Visits f(offset in memory, place in the buffer), along the memory where rows are its neighbours.
template <class F>
void each_element(const View& view, const Window& w, const F& f) {
    if (w.rows == 1 && view.col_stride == 1) {
        for (int i = 0; i < w.cols; ++i) f(i, i);
    } else if (w.rows == 1) {
        for (int i = 0; i < w.cols; ++i) f(i * view.col_stride, i);
    } else {
        for (int c = 0; c < w.cols; ++c) {
            for (int r = 0; r < w.rows; ++r) f(r * view.row_stride + c * view.col_stride, r * w.cols + c);
        }
    }
}

// f(pointer to the window's first element)
template <class F>
void with_type(const View& view, const Window& w, const F& f) {
    const int64_t offset = w.row * view.row_stride + w.col * view.col_stride;
    if (view.dtype == kFloat64) return f(static_cast<double*>(view.data) + offset);
    by_dtype(view.dtype, [&](auto tag) { f(static_cast<decltype(tag)*>(view.data) + offset); });
}

float narrow(double x) { return float(x); }
template <class T>
float narrow(T x) {
    return to_float(x);
}

void widen(float x, double& to) { to = double(x); }
template <class T>
void widen(float x, T& to) {
    to = from_float<T>(x);
}

void load(const View& view, const Window& w, float* to) {
    with_type(view, w, [&](auto* from) { each_element(view, w, [&](int64_t offset, int i) { to[i] = narrow(from[offset]); }); });
}

void store(const View& view, const Window& w, const float* from) {
    with_type(view, w, [&](auto* to) { each_element(view, w, [&](int64_t offset, int i) { widen(from[i], to[offset]); }); });
}

void round_to(int dtype, float* x, int count) {
    by_dtype(dtype, [&](auto tag) {
        for (int i = 0; i < count; ++i) x[i] = to_float(from_float<decltype(tag)>(x[i]));
    });
}

// The order of keys is the same in every dtype, so masks are taken from the fp32 copies.
using MaskBlock = void (*)(const float* p, int count, int n, int m, uint8_t* keep);

template <class P>
void mask_block(const float* w, int count, P p, uint8_t* keep) {
    uint32_t keys[P::capacity];
    for (int first = 0; first < count; first += p.m) {
        for (int i = 0; i < p.m; ++i) keys[i] = Key<float>::of(w[first + i]);
        mask_group(keys, p.n, p.m, Key<float>::bits, keep + first);
    }
}

template <int N, int M>
void mask_fixed(const float* w, int count, int, int, uint8_t* keep) {
    mask_block(w, count, Fixed<N, M>{}, keep);
}

void mask_any(const float* w, int count, int n, int m, uint8_t* keep) { mask_block(w, count, Any{n, m}, keep); }

template <int N, int M>
MaskBlock masker_of(Fixed<N, M>) {
    return mask_fixed<N, M>;
}

MaskBlock masker_of(Any) { return mask_any; }

// Eight running sums, added up in a fixed order: fast, and the same on every machine.
template <class F>
double lane_sum(int count, const F& term) {
    double lane[8] = {};
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int k = 0; k < 8; ++k) lane[k] += term(i + k);
    }
    for (; i < count; ++i) lane[i & 7] += term(i);
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

enum Stat { kApplied, kChange, kLogChange, kUnchanged, kFlips, kPrunedWeight, kPrunedGrad, kNonZeros, kLargest, kStats };

struct Partial {
    double value[kStats] = {};
};

void add(double* total, const Partial& part) {
    for (int i = kChange; i < kLargest; ++i) total[i] += part.value[i];
    const double u = part.value[kLargest];
    if (!(u <= total[kLargest])) total[kLargest] = std::isnan(total[kLargest]) ? total[kLargest] : u;
}

class Block {
  public:
    Block(const AdamWCall& call, const AdamWParam& param, const AdamW& s, MaskBlock mask) : call_(call), param_(param), s_(s), mask_(mask) {}

    void run(const Window& window, Partial& stats) {
        window_ = window;
        count_ = window.count();
        load(param_.p, window, p_);
        load(param_.grad, window, g_);
        gradient(stats);
        moments(stats);
        update(stats);
        finish(stats);
    }

  private:
    void gradient(Partial& stats) {
        if (call_.grad_scale) {
            const float scale = *call_.grad_scale;
            for (int i = 0; i < count_; ++i) g_[i] = g_[i] / scale;
        }
        if (s_.maximize) {
            for (int i = 0; i < count_; ++i) g_[i] = -g_[i];
        }
        if (!mask_) return;
        mask_(p_, count_, call_.n, call_.m, before_);
        stats.value[kPrunedWeight] += lane_sum(count_, [&](int i) { return double(kept_or_zero(magnitude(p_[i]), before_[i] ^ 1u)); });
        stats.value[kPrunedGrad] += lane_sum(count_, [&](int i) { return double(kept_or_zero(magnitude(g_[i]), before_[i] ^ 1u)); });
        if (s_.decay == 0.0f) return;
        for (int i = 0; i < count_; ++i) {
            const float decayed = g_[i] + (s_.decay * p_[i]);
            g_[i] = bits_float(float_bits(kept_or_zero(g_[i], before_[i])) | float_bits(kept_or_zero(decayed, before_[i] ^ 1u)));
        }
    }

    void moments(Partial& stats) {
        load(param_.avg, window_, m_);
        for (int i = 0; i < count_; ++i) m_[i] = adamw_first(s_, m_[i], g_[i]);
        store(param_.avg, window_, m_);
        if (s_.frozen) {
            load(param_.top ? param_.top : param_.sq, window_, v_);
            return;
        }
        load(param_.sq, window_, old_);
        for (int i = 0; i < count_; ++i) v_[i] = adamw_second(s_, old_[i], g_[i]);
        store(param_.sq, window_, v_);
        stats.value[kChange] += lane_sum(count_, [&](int i) { return double(magnitude(v_[i] - old_[i])); });
        if (call_.geometric) logarithms(stats);
        if (!param_.top) return;
        load(param_.top, window_, old_);
        for (int i = 0; i < count_; ++i) v_[i] = larger(old_[i], v_[i]);
        store(param_.top, window_, v_);
    }

    void logarithms(Partial& stats) {
        constexpr double kSmallest = 0x1p-149;  // the smallest fp32 denormal
        stats.value[kLogChange] += lane_sum(count_, [&](int i) {
            const double change = double(magnitude(v_[i] - old_[i]));
            return std::log(change < kSmallest ? kSmallest : change);
        });
        int unchanged = 0;
        for (int i = 0; i < count_; ++i) unchanged += v_[i] == old_[i];
        stats.value[kUnchanged] += unchanged;
    }

    void update(Partial& stats) {
        for (int i = 0; i < count_; ++i) m_[i] = adamw_update(s_, m_[i], v_[i]);
        // magnitudes order as their bits do, with every NaN on top
        uint32_t largest = 0;
        for (int i = 0; i < count_; ++i) largest = std::max(largest, float_bits(m_[i]) & 0x7fffffffu);
        Partial one;
        one.value[kLargest] = double(bits_float(largest));
        add(stats.value, one);
        if (s_.clamp != 0.0f) {
            for (int i = 0; i < count_; ++i) m_[i] = adamw_clamp(s_, m_[i]);
        }
        for (int i = 0; i < count_; ++i) p_[i] = adamw_apply(s_, p_[i], m_[i]);
        round_to(param_.p.dtype, p_, count_);
        store(param_.p, window_, p_);
    }

    void finish(Partial& stats) {
        int flips = 0, non_zeros = 0;
        if (mask_) {
            mask_(p_, count_, call_.n, call_.m, after_);
            for (int i = 0; i < count_; ++i) {
                flips += before_[i] != after_[i];
                p_[i] = kept_or_zero(p_[i], after_[i]);
            }
        }
        for (int i = 0; i < count_; ++i) non_zeros += p_[i] != 0.0f;
        stats.value[kFlips] += flips;
        stats.value[kNonZeros] += non_zeros;
        if (param_.out) store(param_.out, window_, p_);
    }

    const AdamWCall& call_;
    const AdamWParam& param_;
    const AdamW& s_;
    const MaskBlock mask_;
    Window window_{};
    int count_ = 0;
    float p_[kBlock], g_[kBlock], m_[kBlock], v_[kBlock], old_[kBlock];
    uint8_t before_[kBlock], after_[kBlock];
};

// How one parameter is cut: into tiles, and these into windows.
struct Cut {
    int64_t tile_rows, tile_cols, across, tiles, first;  // `first`: number of tiles of the parameters before
    int window_rows, window_cols;
};

bool is_flat(const View& view, const AdamWParam& param) {
    return !view || (view.col_stride == 1 && (param.rows <= 1 || view.row_stride == param.cols));
}

// A parameter that lies flat in memory, as everything that belongs to it, is one long row.
AdamWParam flattened(AdamWParam param) {
    for (const View* view : {&param.p, &param.grad, &param.avg, &param.sq, &param.top, &param.out}) {
        if (!is_flat(*view, param)) return param;
    }
    param.cols *= param.rows;
    param.rows = param.cols > 0 ? 1 : 0;
    return param;
}

Cut cut(const AdamWParam& param, int64_t m, int64_t first) {
    const int64_t group = m > 0 ? m : 1;
    const bool turned = param.rows > 1 && param.p.col_stride != 1;
    Cut c{};
    c.first = first;
    if (param.rows == 0 || param.cols == 0) return c;
    c.window_cols = int(std::max<int64_t>((turned ? kLine : kBlock) / group * group, group));
    c.window_rows = turned ? std::clamp(kBlock / c.window_cols, 1, kLine) : 1;
    const int64_t widest = turned ? c.window_cols : kTile;
    c.tile_cols = std::min(param.cols, std::max(widest / group * group, group));
    c.tile_rows = std::max<int64_t>(1, kTile / c.tile_cols);
    c.across = (param.cols + c.tile_cols - 1) / c.tile_cols;
    c.tiles = (param.rows + c.tile_rows - 1) / c.tile_rows * c.across;
    return c;
}

void run_tile(Block& block, const AdamWParam& param, const Cut& c, int64_t tile, Partial& stats) {
    const int64_t row = tile / c.across * c.tile_rows, col = tile % c.across * c.tile_cols;
    const int64_t last_row = std::min(row + c.tile_rows, param.rows), last_col = std::min(col + c.tile_cols, param.cols);
    for (int64_t r = row; r < last_row; r += c.window_rows) {
        for (int64_t at = col; at < last_col; at += c.window_cols) {
            block.run({r, at, int(std::min<int64_t>(c.window_rows, last_row - r)), int(std::min<int64_t>(c.window_cols, last_col - at))}, stats);
        }
    }
}

}  // namespace

namespace NM_ISA {

void masked_adamw(const std::vector<AdamWParam>& given, const AdamWCall& call, double* stats, int threads) {
    for (int i = 0; i < kStats; ++i) stats[i] = 0.0;
    MaskBlock masker = nullptr;
    if (call.n || call.m) by_pattern(call.n, call.m, [&](auto pattern) { masker = masker_of(pattern); });
    if (call.found_inf && *call.found_inf != 0.0f) return;
    stats[kApplied] = 1.0;

    std::vector<AdamWParam> params;
    std::vector<AdamW> scalars;
    std::vector<Cut> cuts;
    int64_t tiles = 0;
    for (const AdamWParam& one : given) {
        params.push_back(flattened(one));
        *one.step += 1.0f;
        scalars.push_back(adamw_scalars(call.hyper, int64_t(*one.step), call.frozen, call.eps_inside, call.maximize));
        cuts.push_back(cut(params.back(), call.m, tiles));
        tiles += cuts.back().tiles;
    }
    std::vector<Partial> partial{size_t(tiles)};
    parallel_for(tiles, threads, [&](int64_t tile) {
        const auto next = std::upper_bound(cuts.begin(), cuts.end(), tile, [](int64_t t, const Cut& c) { return t < c.first; });
        const size_t i = size_t(next - cuts.begin()) - 1;
        Block block(call, params[i], scalars[i], masker);
        run_tile(block, params[i], cuts[i], tile - cuts[i].first, partial[size_t(tile)]);
    });
    for (const Partial& one : partial) add(stats, one);
}

}  // namespace NM_ISA
}  // namespace nm
