// MaskedAdamW: one pass over each parameter and its state. A parameter is cut into tiles of about 4096 elements that
// depend on its shape and strides alone; their statistics are added in order, so that any number of threads gives the
// same bits. Inside a tile, blocks of at most 256 elements go through adamw_block.h: where they lie in memory if that
// is fp32, one after another and whole strips of 64 (then a tile at once, if masks can), else in buffers.
#include <algorithm>
#include <cmath>

#include "../kernels.h"
#include "adamw_block.h"

namespace nm {
namespace {

constexpr int64_t kTile = 4096;  // elements in one partial of the statistics
constexpr int kLineRows = 16;        // rows of a block whose neighbours in memory are rows: they fill a cache line

// The part of a parameter that one block works on; element (r, c) sits at r * cols + c of the block's buffers.
struct Window {
    int64_t row, col, rows, cols;

    int count() const { return int(rows * cols); }
};

// f(pointer to the window's first element)
template <class F>
void with_type(const View& view, const Window& w, const F& f) {
    const int64_t offset = w.row * view.row_stride + w.col * view.col_stride;
    if (view.dtype == kFloat64) return f(static_cast<double*>(view.data) + offset);
    by_dtype(view.dtype, [&](auto tag) { f(static_cast<decltype(tag)*>(view.data) + offset); });
}

inline void to_floats(const double* from, int64_t count, float* to) { std::copy(from, from + count, to); }
inline void from_floats(const float* from, int64_t count, double* to) { std::copy(from, from + count, to); }

// Rows, or columns where these lie along the memory: then a tile of up to kLineRows of each is transposed in registers.
struct LineTile {
    alignas(64) float at[kBlock][kLineRows];  // columns of a window, each a line
};

// to[r * cols + c] = line c, place r; `rows` of kLineRows are filled.
void turn_tile(const LineTile& tile, int64_t rows, int64_t cols, float* to) {
    int64_t c = 0;
    if (rows == kLineRows) {
        for (; c + kLanes <= cols; c += kLanes) {
            for (int r = 0; r < kLineRows; r += kLanes) transpose(&tile.at[c][r], kLineRows, to + r * cols + c, cols);
        }
    }
    for (; c < cols; ++c) {
        for (int64_t r = 0; r < rows; ++r) to[r * cols + c] = tile.at[c][r];
    }
}

void turn_back(const float* from, int64_t rows, int64_t cols, LineTile& tile) {
    int64_t c = 0;
    if (rows == kLineRows) {
        for (; c + kLanes <= cols; c += kLanes) {
            for (int r = 0; r < kLineRows; r += kLanes) transpose(from + r * cols + c, cols, &tile.at[c][r], kLineRows);
        }
    }
    for (; c < cols; ++c) {
        for (int64_t r = 0; r < rows; ++r) tile.at[c][r] = from[r * cols + c];
    }
}

bool along_columns(const View& view, const Window& w) { return view.row_stride == 1 && view.col_stride != 1 && w.rows <= kLineRows && w.cols <= kBlock; }

void load(const View& view, const Window& w, float* to) {
    with_type(view, w, [&](auto* from) {
        if (view.col_stride == 1) {
            for (int64_t r = 0; r < w.rows; ++r) to_floats(from + r * view.row_stride, w.cols, to + r * w.cols);
        } else if (along_columns(view, w)) {
            LineTile tile;
            for (int64_t c = 0; c < w.cols; ++c) {
                __builtin_prefetch(from + c * view.col_stride + 2 * kLineRows);  // for the window after the next
                to_floats(from + c * view.col_stride, w.rows, tile.at[c]);
            }
            turn_tile(tile, w.rows, w.cols, to);
        } else {
            for (int64_t r = 0; r < w.rows; ++r) {
                for (int64_t c = 0; c < w.cols; ++c) to_floats(from + r * view.row_stride + c * view.col_stride, 1, to + r * w.cols + c);
            }
        }
    });
}

void store(const View& view, const Window& w, const float* from) {
    with_type(view, w, [&](auto* to) {
        if (view.col_stride == 1) {
            for (int64_t r = 0; r < w.rows; ++r) from_floats(from + r * w.cols, w.cols, to + r * view.row_stride);
        } else if (along_columns(view, w)) {
            LineTile tile;
            turn_back(from, w.rows, w.cols, tile);
            for (int64_t c = 0; c < w.cols; ++c) from_floats(tile.at[c], w.rows, to + c * view.col_stride);
        } else {
            for (int64_t r = 0; r < w.rows; ++r) {
                for (int64_t c = 0; c < w.cols; ++c) from_floats(from + r * w.cols + c, 1, to + r * view.row_stride + c * view.col_stride);
            }
        }
    });
}

// The elements of one view in a block: where they lie, or in a buffer.
class Column {
  public:
    // The window's elements, one after another, padded with zeros to whole strips.
    float* open(const View& view, const Window& w) {
        float* direct = in_place(view, w);
        if (direct) return direct;
        const int count = w.count();
        load(view, w, buffer_);
        std::fill(buffer_ + count, buffer_ + (count + kStrip - 1) / kStrip * kStrip, 0.0f);
        return buffer_;
    }

    // Writes back what `open` returned.
    void close(const View& view, const Window& w, const float* from) {
        if (from == buffer_) store(view, w, buffer_);
    }

  private:
    static float* in_place(const View& view, const Window& w) {
        const bool whole = view.dtype == kFloat32 && view.col_stride == 1 && w.rows == 1 && w.cols % kStrip == 0;
        return whole ? static_cast<float*>(view.data) + (w.row * view.row_stride + w.col) : nullptr;
    }

    alignas(64) float buffer_[kBlock];
};

// The held mask of a window, bit i of a strip's word: its i-th element. Windows begin with a byte.
void gather(const AdamWParam& param, const Window& w, uint64_t* bits) {
    const int64_t across = (param.cols + 7) / 8;
    const uint8_t* const from = param.mask + (w.row * across + w.col / 8);
    std::fill_n(bits, (w.count() + kStrip - 1) / kStrip, uint64_t(0));
    if (w.rows == 1) {
        std::memcpy(bits, from, size_t(w.cols + 7) / 8);
        return;
    }
    for (int64_t r = 0, i = 0; r < w.rows; ++r) {
        for (int64_t c = 0; c < w.cols; ++c, ++i) bits[i / kStrip] |= uint64_t(from[r * across + c / 8] >> (c % 8) & 1) << (i % kStrip);
    }
}

template <class Masks>
class Stepper {
  public:
    Stepper(const AdamWCall& call, const Masks& masks) : call_(call), masks_(masks) {}

    void run(const AdamWParam& param, const AdamW& s, const Window& w, Tally& tally) {
        Elements e{};
        e.count = w.count();
        e.dtype = param.p.dtype;
        e.p = p_.open(param.p, w);
        e.g = g_.open(param.grad, w);
        e.m = m_.open(param.avg, w);
        e.v = v_.open(s.frozen && param.top ? param.top : param.sq, w);
        e.top = !s.frozen && param.top ? top_.open(param.top, w) : nullptr;
        if constexpr (std::is_same_v<Masks, Held>) {
            gather(param, w, bits_);
            e.bits = bits_;
        }
        step_any(s, call_, e, masks_, tally);
        p_.close(param.p, w, e.p);
        m_.close(param.avg, w, e.m);
        if (!s.frozen) v_.close(param.sq, w, e.v);
        if (e.top) top_.close(param.top, w, e.top);
    }

  private:
    const AdamWCall& call_;
    const Masks& masks_;
    Column p_, g_, m_, v_, top_;
    uint64_t bits_[kTile / kStrip];  // of Held; the widest window is a tile
};

enum Stat { kApplied, kChange, kLogChange, kUnchanged, kFlips, kPrunedWeight, kPrunedGrad, kNonZeros, kLargest, kStats };

struct Partial {
    double value[kStats] = {};
};

// Σ log = log of the lanes' products. Not of infinities and NaN: their logarithms sum to what they sum to themselves.
double sum_of_logarithms(const Tally& t) {
    const double sum = total(t.change);
    if (!std::isfinite(sum)) return sum;
    double mantissa[8], log[8];
    int64_t exponent[8], exponents = -1023 * t.factors;
    std::memcpy(mantissa, t.log_change.mantissas, sizeof mantissa);
    std::memcpy(exponent, t.log_change.exponents, sizeof exponent);
    for (int i = 0; i < 8; ++i) {
        log[i] = std::log(mantissa[i]);
        exponents += exponent[i];
    }
    return double(exponents) * 0x1.62e42fefa39efp-1 + total(log);
}

Partial partial_of(const Tally& t, bool geometric) {
    Partial part;
    part.value[kChange] = total(t.change) / kScale;
    part.value[kLogChange] = geometric ? sum_of_logarithms(t) : 0.0;
    part.value[kUnchanged] = double(total(t.unchanged));
    part.value[kFlips] = double(total(t.flips));
    part.value[kPrunedWeight] = total(t.pruned_weight) / kScale;
    part.value[kPrunedGrad] = total(t.pruned_grad) / kScale;
    part.value[kNonZeros] = double(total(t.non_zeros));
    part.value[kLargest] = double(bits_float(largest_lane(bits_of(t.highest))));
    return part;
}

void add(double* to, const Partial& part) {
    for (int i = kChange; i < kLargest; ++i) to[i] += part.value[i];
    const double u = part.value[kLargest];
    if (!(u <= to[kLargest])) to[kLargest] = std::isnan(to[kLargest]) ? to[kLargest] : u;
}

// How one parameter is cut: into tiles, and these into windows.
struct Cut {
    int64_t tile_rows, tile_cols, across, tiles, first;  // `first`: number of tiles of the parameters before
    int window_rows, window_cols;
    bool direct;  // whole strips of a row need no buffers
};

bool is_flat(const View& view, const AdamWParam& param) {
    return !view || (view.col_stride == 1 && (param.rows <= 1 || view.row_stride == param.cols));
}

// A parameter that lies flat in memory, as everything that belongs to it, is one long row. The rows of a mask are whole bytes.
AdamWParam flattened(AdamWParam param) {
    if (param.mask && param.cols % 8 && param.rows > 1) return param;
    for (const View* view : {&param.p, &param.grad, &param.avg, &param.sq, &param.top}) {
        if (!is_flat(*view, param)) return param;
    }
    param.cols *= param.rows;
    param.rows = param.cols > 0 ? 1 : 0;
    return param;
}

bool is_direct(const AdamWParam& param, int64_t m) {
    for (const View* view : {&param.p, &param.grad, &param.avg, &param.sq, &param.top}) {
        if (*view && (view->dtype != kFloat32 || view->col_stride != 1)) return false;
    }
    return param.cols >= kBlock && (m == 0 || kStrip % m == 0);
}

Cut cut(const AdamWParam& param, int m, int64_t first) {
    const int64_t group = std::max(m, 1);
    const bool transposed = param.rows > 1 && param.p.col_stride != 1;
    Cut c{};
    c.first = first;
    c.direct = is_direct(param, m);
    if (param.rows == 0 || param.cols == 0) return c;
    const int64_t widest = std::max<int64_t>((transposed ? kLineRows : kBlock) / group * group, group);
    c.window_cols = int(std::min(param.cols, widest));
    c.window_rows = std::clamp(kBlock / c.window_cols, 1, transposed ? kLineRows : kBlock);
    c.tile_cols = transposed ? c.window_cols : std::min(param.cols, std::max(kTile / widest * widest, widest));
    c.tile_rows = std::max<int64_t>(1, kTile / c.tile_cols);
    c.across = (param.cols + c.tile_cols - 1) / c.tile_cols;
    c.tiles = (param.rows + c.tile_rows - 1) / c.tile_rows * c.across;
    return c;
}

template <class Masks>
void run_tile(Stepper<Masks>& stepper, const AdamWParam& param, const AdamW& s, const Cut& c, int64_t tile, Tally& tally) {
    const int64_t row = tile / c.across * c.tile_rows, col = tile % c.across * c.tile_cols;
    const int64_t last_row = std::min(row + c.tile_rows, param.rows), last_col = std::min(col + c.tile_cols, param.cols);
    for (int64_t r = row; r < last_row; r += c.window_rows) {
        int64_t cols;
        for (int64_t at = col; at < last_col; at += cols) {
            const int64_t rows = std::min<int64_t>(c.window_rows, last_row - r), left = last_col - at;
            cols = c.direct && left >= kStrip ? left / kStrip * kStrip : std::min<int64_t>(c.window_cols, left);
            stepper.run(param, s, {r, at, rows, cols}, tally);
        }
    }
}

// One parameter's part of a call.
struct Item {
    AdamWParam param;
    AdamW scalars;
    Cut cut;
};

template <class Masks>
void run_tiles(const std::vector<Item>& items, const AdamWCall& call, const Masks& masks, int64_t begin, int64_t end, Partial* partial) {
    Stepper<Masks> stepper(call, masks);
    auto next = std::upper_bound(items.begin(), items.end(), begin, [](int64_t tile, const Item& item) { return tile < item.cut.first; });
    const Item* item = &*(next - 1);
    for (int64_t tile = begin; tile < end; ++tile) {
        while (tile - item->cut.first >= item->cut.tiles) ++item;
        Tally tally;
        run_tile(stepper, item->param, item->scalars, item->cut, tile - item->cut.first, tally);
        partial[tile] = partial_of(tally, call.geometric);
    }
}

}  // namespace

namespace NM_ISA {

void masked_adamw(const std::vector<AdamWParam>& given, const AdamWCall& call, double* stats, int threads) {
    for (int i = 0; i < kStats; ++i) stats[i] = 0.0;
    if (call.n || call.m) check_pattern(call.n, call.m);
    if (call.found_inf && *call.found_inf != 0.0f) return;
    stats[kApplied] = 1.0;

    std::vector<Item> items;
    int64_t tiles = 0;
    for (const AdamWParam& one : given) {
        const AdamWParam param = flattened(one);
        *one.step += 1.0f;
        const AdamW scalars = adamw_scalars(call.hyper, int64_t(*one.step), call.frozen, call.eps_inside, call.maximize);
        items.push_back({param, scalars, cut(param, call.m, tiles)});
        tiles += items.back().cut.tiles;
    }
    std::vector<Partial> partial{size_t(tiles)};
    with_masks(call.n, call.m, call.held, [&](const auto& masks) {
        parallel_ranges(tiles, kTile, threads, [&](int64_t begin, int64_t end) { run_tiles(items, call, masks, begin, end, partial.data()); });
    });
    for (const Partial& one : partial) add(stats, one);
}

}  // namespace NM_ISA
}  // namespace nm
