// MaskedAdamW: one pass over each parameter and its state. A parameter is cut into tiles of about 4096 elements that
// depend on its shape and strides alone; their statistics are added in order, so that any number of threads gives the
// same bits. Inside a tile, blocks of at most 256 elements go through the steps of core/adamw.h in fp32 buffers.
#include "../core/adamw.h"

#include <algorithm>
#include <cmath>

#include "../core/rank.h"
#include "kernels.h"

namespace nm {
namespace {

constexpr int kBlock = 256;          // elements worked on together, a whole number of groups
constexpr int64_t kTile = 4096;      // elements in one partial of the statistics
constexpr int64_t kNarrowTile = 256; // columns of a tile whose neighbours in memory are rows: 16 rows fill a cache line

template <class T>
void load_as(const void* data, int64_t stride, int count, float* to) {
    const T* from = static_cast<const T*>(data);
    if (stride == 1) {
        for (int i = 0; i < count; ++i) to[i] = to_float(from[i]);
    } else {
        for (int i = 0; i < count; ++i) to[i] = to_float(from[i * stride]);
    }
}

template <class T>
void store_as(void* data, int64_t stride, int count, const float* from) {
    T* to = static_cast<T*>(data);
    if (stride == 1) {
        for (int i = 0; i < count; ++i) to[i] = from_float<T>(from[i]);
    } else {
        for (int i = 0; i < count; ++i) to[i * stride] = from_float<T>(from[i]);
    }
}

void* element(const View& view, int64_t row, int64_t col) {
    const int64_t size = view.dtype == kFloat64 ? 8 : view.dtype == kFloat32 ? 4 : 2;
    return static_cast<char*>(view.data) + (row * view.row_stride + col * view.col_stride) * size;
}

void load(const View& view, int64_t row, int64_t col, int count, float* to) {
    const void* from = element(view, row, col);
    if (view.dtype == kFloat64) {
        for (int i = 0; i < count; ++i) to[i] = float(static_cast<const double*>(from)[i * view.col_stride]);
        return;
    }
    by_dtype(view.dtype, [&](auto tag) { load_as<decltype(tag)>(from, view.col_stride, count, to); });
}

void store(const View& view, int64_t row, int64_t col, int count, const float* from) {
    void* to = element(view, row, col);
    if (view.dtype == kFloat64) {
        for (int i = 0; i < count; ++i) static_cast<double*>(to)[i * view.col_stride] = double(from[i]);
        return;
    }
    by_dtype(view.dtype, [&](auto tag) { store_as<decltype(tag)>(to, view.col_stride, count, from); });
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

    void run(int64_t row, int64_t col, int count, Partial& stats) {
        row_ = row;
        col_ = col;
        count_ = count;
        load(param_.p, row, col, count, p_);
        load(param_.grad, row, col, count, g_);
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
        stats.value[kPrunedWeight] += lane_sum(count_, [&](int i) { return before_[i] ? 0.0 : double(magnitude(p_[i])); });
        stats.value[kPrunedGrad] += lane_sum(count_, [&](int i) { return before_[i] ? 0.0 : double(magnitude(g_[i])); });
        if (s_.decay == 0.0f) return;
        for (int i = 0; i < count_; ++i) g_[i] = before_[i] ? g_[i] : g_[i] + (s_.decay * p_[i]);
    }

    void moments(Partial& stats) {
        load(param_.avg, row_, col_, count_, m_);
        for (int i = 0; i < count_; ++i) m_[i] = adamw_first(s_, m_[i], g_[i]);
        store(param_.avg, row_, col_, count_, m_);
        if (s_.frozen) {
            load(param_.top ? param_.top : param_.sq, row_, col_, count_, v_);
            return;
        }
        load(param_.sq, row_, col_, count_, old_);
        for (int i = 0; i < count_; ++i) v_[i] = adamw_second(s_, old_[i], g_[i]);
        store(param_.sq, row_, col_, count_, v_);
        stats.value[kChange] += lane_sum(count_, [&](int i) { return double(magnitude(v_[i] - old_[i])); });
        if (call_.geometric) logarithms(stats);
        if (!param_.top) return;
        load(param_.top, row_, col_, count_, old_);
        for (int i = 0; i < count_; ++i) v_[i] = larger(old_[i], v_[i]);
        store(param_.top, row_, col_, count_, v_);
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
        store(param_.p, row_, col_, count_, p_);
    }

    void finish(Partial& stats) {
        int flips = 0, non_zeros = 0;
        if (mask_) {
            mask_(p_, count_, call_.n, call_.m, after_);
            for (int i = 0; i < count_; ++i) {
                flips += before_[i] != after_[i];
                p_[i] = after_[i] ? p_[i] : 0.0f;
            }
        }
        for (int i = 0; i < count_; ++i) non_zeros += p_[i] != 0.0f;
        stats.value[kFlips] += flips;
        stats.value[kNonZeros] += non_zeros;
        if (param_.out) store(param_.out, row_, col_, count_, p_);
    }

    const AdamWCall& call_;
    const AdamWParam& param_;
    const AdamW& s_;
    const MaskBlock mask_;
    int64_t row_ = 0, col_ = 0;
    int count_ = 0;
    float p_[kBlock], g_[kBlock], m_[kBlock], v_[kBlock], old_[kBlock];
    uint8_t before_[kBlock], after_[kBlock];
};

// How one parameter is cut into tiles.
struct Cut {
    int64_t tile_rows, tile_cols, across, tiles, first;  // `first`: number of tiles of the parameters before
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
    const int64_t widest = param.rows <= 1 || param.p.col_stride == 1 ? kTile : kNarrowTile;
    Cut c{};
    c.first = first;
    if (param.rows == 0 || param.cols == 0) return c;
    c.tile_cols = std::min(param.cols, std::max<int64_t>(widest / group * group, group));
    c.tile_rows = std::max<int64_t>(1, kTile / c.tile_cols);
    c.across = (param.cols + c.tile_cols - 1) / c.tile_cols;
    c.tiles = (param.rows + c.tile_rows - 1) / c.tile_rows * c.across;
    return c;
}

void run_tile(Block& block, const AdamWParam& param, const Cut& c, int64_t tile, int step, Partial& stats) {
    const int64_t row = tile / c.across * c.tile_rows, col = tile % c.across * c.tile_cols;
    const int64_t last_row = std::min(row + c.tile_rows, param.rows), last_col = std::min(col + c.tile_cols, param.cols);
    for (int64_t r = row; r < last_row; ++r) {
        for (int64_t at = col; at < last_col; at += step) block.run(r, at, int(std::min<int64_t>(step, last_col - at)), stats);
    }
}

}  // namespace

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
    const int step = call.m > 0 ? kBlock / call.m * call.m : kBlock;
    std::vector<Partial> partial{size_t(tiles)};
    parallel_for(tiles, threads, [&](int64_t tile) {
        const auto next = std::upper_bound(cuts.begin(), cuts.end(), tile, [](int64_t t, const Cut& c) { return t < c.first; });
        const size_t i = size_t(next - cuts.begin()) - 1;
        Block block(call, params[i], scalars[i], masker);
        run_tile(block, params[i], cuts[i], tile - cuts[i].first, step, partial[size_t(tile)]);
    });
    for (const Partial& one : partial) add(stats, one);
}

}  // namespace nm
