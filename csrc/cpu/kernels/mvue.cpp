// mvue and mvue_compress along any dimension: g is [outer, length, inner], contiguous, and groups run along `length`.
// After moving that dimension last there are outer*inner rows; group j = row * groups_per_row + group.
//
// kLanes rows are worked on side by side, one in each lane, a strip of groups at a time: their elements are loaded as
// vectors (neighbouring columns are such vectors already, rows along memory are transposed), estimated, and transposed
// again on the way out. So packing along tokens is no different from packing along the last dimension.
#include "../../core/mvue.h"

#include <algorithm>
#include <stdexcept>

#include "../kernels.h"
#include "../stream.h"
#include "mvue_estimate.h"
#include "mvue_level.h"
#include "mvue_pack.h"
#include "mvue_philox.h"
#include "mvue_tile.h"

namespace nm {
namespace {

constexpr int kChunkItems = 128;   // elements of each row loaded at once: 8 KB of 16 floats, well inside the first cache
constexpr int kStripSlots = 64;    // slots collected before they are stored: whole cache lines of any element type
constexpr int kColumns = 256;      // columns of one task
constexpr int kMaxChunk = kMaxM + 2 * kLanes, kMaxSlots = kStripSlots + 2 * kMaxM;

// Groups loaded at once. A multiple of 8 where indices are shorter than a byte, so that strips begin on a byte.
int chunk_groups(int m) { return m > 16 ? std::max(1, kChunkItems / m) : std::max(8, kChunkItems / m / 8 * 8); }

int strip_groups(int n, int m) {
    const int chunk = chunk_groups(m);
    return (kStripSlots + n * chunk - 1) / (n * chunk) * chunk;
}

// Up to kLanes rows from one group on: row l begins at g + l * row_step, and its first group has number j + l * j_step.
template <class T>
struct Strip {
    const T* g;
    int64_t row_step, item_step;
    int lanes;
    int64_t items, there;  // elements of the strip; elements until the row ends
    int64_t j, j_step;
    const T* next;  // row 0 of the strip that follows
};

// Fetches what is loaded next, a little with each group: all at once, the fetches wait for each other.
class Ahead {
  public:
    // Of a group, `bytes` bytes in steps of `step`.
    Ahead(const void* from, int64_t bytes, int64_t step) : from_(reinterpret_cast<uintptr_t>(from)), bytes_(bytes), step_(step) {}

    NM_INLINE void fetch() {
        for (int64_t at = 0; at < bytes_; at += step_) __builtin_prefetch(reinterpret_cast<const void*>(from_ + uintptr_t(at)));
        from_ += uintptr_t(bytes_);
    }

  private:
    uintptr_t from_;
    int64_t bytes_, step_;
};

// The uniforms of a strip, group by group.
class Uniforms {
  public:
    Uniforms(const PhiloxLanes& philox, int64_t j, int64_t j_step)
        : philox_(philox), one_each_(philox_, j, j_step), counter_(j, j_step, 0) {}

    NM_INLINE Uints one() {
        if (used_ == 4) {
            four_ = one_each_.next_four();
            used_ = 0;
        }
        return four_.w[used_++];
    }

    NM_INLINE LaneWords two() {
        const LaneWords words = philox_(counter_.lo, counter_.hi);
        counter_.next();
        return words;
    }

  private:
    const PhiloxLanes& philox_;
    OneEach one_each_;
    LaneCounter counter_;
    LaneWords four_;
    int used_ = 4;
};

// The estimates of `groups` groups of every lane, into x itself or, packed, to `slots`.
template <bool Approx, bool Pack, class P>
void estimate(P p, Uniforms& uniforms, Ahead& ahead, int64_t groups, float* x, Slots& to) {
    Slots slots = to;  // whatever is stored might be a part of `to`, as far as the compiler knows
    for (int64_t group = 0; group < groups; ++group, x += p.m * kLanes) {
        ahead.fetch();
        Floats result[P::capacity];
        if constexpr (Approx) {
            const LaneWords words = uniforms.two();
            approx(p, x, words.w[0], words.w[1], result);
        } else {
            exact(p, x, uniforms.one(), result);
        }
        if constexpr (Pack) {
            pack(p, result, slots);
        } else {
            NM_UNROLL_8 for (int i = 0; i < p.m; ++i) store(x + i * kLanes, result[i]);
        }
    }
    to = slots;
}

using Estimate = void (*)(int n, int m, bool approx, bool packed, Uniforms& uniforms, Ahead& ahead, int64_t groups, float* x, Slots& slots);

// The same by level, to type T.
template <class T, int N, int M>
void estimate_by_level(int, int, bool, bool packed, Uniforms& uniforms, Ahead& ahead, int64_t groups, float* x, Slots& to) {
    constexpr Fixed<N, M> p;
    Slots slots = to;
    for (int64_t group = 0; group < groups; ++group, x += M * kLanes) {
        ahead.fetch();
        const Sampled<N> kept = sample<T>(p, x, uniforms.one());
        if (packed) {
            put(p, kept.value, kept.index, slots);
        } else {
            NM_UNROLL_16 for (int i = 0; i < M; ++i) store(x + i * kLanes, element(kept, i));
        }
    }
    to = slots;
}

template <bool Approx, class P>
void estimate(P p, bool packed, Uniforms& uniforms, Ahead& ahead, int64_t groups, float* x, Slots& slots) {
    packed ? estimate<Approx, true>(p, uniforms, ahead, groups, x, slots) : estimate<Approx, false>(p, uniforms, ahead, groups, x, slots);
}

void estimate_any(int n, int m, bool approx, bool packed, Uniforms& uniforms, Ahead& ahead, int64_t groups, float* x, Slots& slots) {
    const Any p{n, m};
    approx ? estimate<true>(p, packed, uniforms, ahead, groups, x, slots) : estimate<false>(p, packed, uniforms, ahead, groups, x, slots);
}

template <bool Approx, int N, int M>
void estimate_fixed(int, int, bool, bool packed, Uniforms& uniforms, Ahead& ahead, int64_t groups, float* x, Slots& slots) {
    estimate<Approx>(Fixed<N, M>{}, packed, uniforms, ahead, groups, x, slots);
}

template <class T>
Estimate estimate_of(int n, int m, bool approx) {
    if (approx) {
        switch (m) {
            case 4: return estimate_fixed<true, 2, 4>;
            case 8: return estimate_fixed<true, 2, 8>;
            case 16: return estimate_fixed<true, 2, 16>;
            default: return estimate_any;
        }
    }
    switch (n << 16 | m) {
        case 1 << 16 | 2: return estimate_by_level<T, 1, 2>;
        case 1 << 16 | 4: return estimate_by_level<T, 1, 4>;
        case 2 << 16 | 4: return estimate_by_level<T, 2, 4>;
        case 1 << 16 | 8: return estimate_by_level<T, 1, 8>;
        case 2 << 16 | 8: return estimate_by_level<T, 2, 8>;
        case 1 << 16 | 16: return estimate_by_level<T, 1, 16>;
        case 2 << 16 | 16: return estimate_by_level<T, 2, 16>;
        case 4 << 16 | 8: return estimate_fixed<false, 4, 8>;
        case 1 << 16 | 32: return estimate_fixed<false, 1, 32>;
        default: return estimate_any;
    }
}

// Where the estimates go: dense, in the layout of g, or packed.
struct Output {
    void *dense, *values;
    uint8_t* indices;
};

template <class T>
class Walk {
  public:
    Walk(const MvueCall& call, int n, int m, const Output& out)
        : call_(call), n_(n), m_(m), out_(out), estimate_(estimate_of<T>(n, m, call.approx)), chunk_(chunk_groups(m)), strip_(strip_groups(n, m)),
          bits_(index_bits(m)), philox_(call.seed, call.offset), groups_((call.length + m - 1) / m), kept_(groups_ * n), bytes_(index_bytes(kept_, bits_)) {
        const int64_t elements = call.outer * call.inner * (out.dense ? call.length : kept_);
        stream_ = elements * int64_t(sizeof(T)) >= kStreamBytes;
    }

    void run(int threads) const {
        if (call_.outer * call_.inner * call_.length == 0) return;
        if (call_.inner > 1) return columns(threads);
        // rows whose groups and packed bytes follow each other without a gap are one long row, cut as suits the machine
        const bool seamless = call_.length % m_ == 0 && kept_ * bits_ % 8 == 0;
        seamless ? one_row(call_.outer * groups_, threads) : rows(threads);
    }

  private:
    // inner > 1: lanes are neighbouring columns.
    void columns(int threads) const {
        const int64_t across = (call_.inner + kColumns - 1) / kColumns, down = (groups_ + strip_ - 1) / strip_;
        parallel_ranges(call_.outer * down * across, int64_t(strip_) * m_ * kColumns, threads, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) {
                const int64_t first = task % across * kColumns, last = std::min<int64_t>(first + kColumns, call_.inner);
                const int64_t group = task / across % down * strip_, outer = task / across / down;
                for (int64_t column = first; column < last; column += kLanes) {
                    side_by_side(outer * call_.inner + column, int(std::min<int64_t>(kLanes, last - column)), group);
                }
            }
            stream_fence();
        });
    }

    // inner == 1: lanes are neighbouring rows.
    void rows(int threads) const {
        const int64_t across = (call_.outer + kLanes - 1) / kLanes, along = (groups_ + strip_ - 1) / strip_;
        parallel_ranges(across * along, int64_t(strip_) * m_ * kLanes, threads, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; ++task) {
                const int64_t row = task / along * kLanes;
                side_by_side(row, int(std::min<int64_t>(kLanes, call_.outer - row)), task % along * strip_);
            }
            stream_fence();
        });
    }

    // A strip of `lanes` rows of the tensor from (row, group) on.
    void side_by_side(int64_t row, int lanes, int64_t group) const {
        const int64_t item = group * m_, outer = row / call_.inner, column = row % call_.inner;
        const int64_t count = std::min<int64_t>(strip_, groups_ - group), there = call_.length - item;
        const int64_t at = (outer * call_.length + item) * call_.inner + column;
        const bool along = call_.inner == 1;
        Strip<T> s{static_cast<const T*>(call_.g) + at, along ? call_.length : 1, call_.inner, lanes, std::min(count * m_, there),
                   there, row * groups_ + group, groups_, static_cast<const T*>(call_.g) + at + (along ? strip_ * m_ : kLanes)};
        strip(s, count, at, row * kept_ + group * n_, kept_, row * bytes_ + group * n_ * bits_ / 8, bytes_);
    }

    // All groups of the tensor in a row: kLanes strips one after the other, each in its lane.
    void one_row(int64_t total, int threads) const {
        const int64_t batch = int64_t(strip_) * kLanes;
        parallel_ranges((total + batch - 1) / batch, batch * m_, threads, [&](int64_t begin, int64_t end) {
            for (int64_t group = begin * batch, last = std::min(end * batch, total); group < last;) {
                // at the end shorter strips, then what does not fill the lanes; all but the last begin on a byte
                int64_t each = std::min<int64_t>(strip_, (last - group) / kLanes);
                if (each < strip_) each = each / 8 * 8;
                const int lanes = each > 0 ? kLanes : 1;
                if (each == 0) each = std::min<int64_t>(strip_, last - group);
                const T* from = static_cast<const T*>(call_.g) + group * m_;
                Strip<T> s{from, each * m_, 1, lanes, each * m_, each * m_, group, each, from + lanes * each * m_};
                strip(s, each, group * m_, group * n_, each * n_, group * n_ * bits_ / 8, each * n_ * bits_ / 8);
                group += lanes * each;
            }
            stream_fence();
        });
    }

    // at, slot, byte: where the first row's outputs go; the steps are those to the next row's.
    void strip(const Strip<T>& s, int64_t groups, int64_t at, int64_t slot, int64_t slot_step, int64_t byte, int64_t byte_step) const {
        alignas(64) float x[kMaxChunk * kLanes], values[kMaxSlots * kLanes];
        alignas(64) uint32_t words[(kMaxSlots / 4 + 1) * kLanes];
        Slots slots{values, words, 0};
        const int64_t used = (groups * n_ * bits_ + 31) / 32;
        if (!out_.dense) std::fill_n(words, used * kLanes, 0u);
        Uniforms uniforms(philox_, s.j, s.j_step);
        for (int64_t done = 0; done < groups; done += chunk_) {
            const int64_t count = std::min<int64_t>(chunk_, groups - done);
            load_chunk(s, done * m_, count * m_, x);
            Ahead ahead = after(s, done, done + count < groups);
            estimate_(n_, m_, call_.approx, !out_.dense, uniforms, ahead, count, x, slots);
            if (out_.dense) store_chunk(s, done * m_, std::min(count * m_, s.items - done * m_), at, x);
        }
        if (out_.dense) return;
        store_elements(values, slots.k, static_cast<T*>(out_.values) + slot, slot_step, s.lanes, stream_);
        const RowWords<float> codes{reinterpret_cast<const float*>(words), used};
        store_rows<false>(codes, index_bytes(slots.k, bits_), reinterpret_cast<char*>(out_.indices) + byte, byte_step, s.lanes);
    }

    // What is loaded after the chunk at group `done`: in columns the chunk below, in rows without gaps the same part of the strip
    // that follows, from row 0 on. Nothing in rows with gaps, which are rare.
    Ahead after(const Strip<T>& s, int64_t done, bool more) const {
        constexpr int64_t size = sizeof(T);
        if (s.item_step == 1) return Ahead(s.next + done * m_ * kLanes, s.row_step == s.items ? kLanes * m_ * size : 0, 64);
        return Ahead(more ? s.g + (done + chunk_) * m_ * s.item_step : s.next, m_ * s.item_step * size, s.item_step * size);
    }

    // Elements [first, first + count) of every lane, zeros past the end of the row.
    void load_chunk(const Strip<T>& s, int64_t first, int64_t count, float* x) const {
        const int64_t real = std::min(count, s.items - first);
        if (s.item_step == 1) {
            load_elements(s.g + first, s.row_step, s.lanes, real, s.there - first, x);
        } else {
            const T* from = s.g + first * s.item_step;
            for (int64_t i = 0; i < real; ++i, from += s.item_step) store(x + i * kLanes, widened(from, s.lanes));
        }
        std::fill(x + real * kLanes, x + count * kLanes, 0.0f);
    }

    void store_chunk(const Strip<T>& s, int64_t first, int64_t count, int64_t at, const float* x) const {
        T* to = static_cast<T*>(out_.dense) + at + first * s.item_step;
        if (s.item_step == 1) return store_elements(x, count, to, s.row_step, s.lanes, stream_);
        for (int64_t i = 0; i < count; ++i, to += s.item_step) {
            if (s.lanes == kLanes) {
                store_narrowed(to, load(x + i * kLanes));
            } else {
                for (int l = 0; l < s.lanes; ++l) to[l] = from_float<T>(x[i * kLanes + l]);
            }
        }
    }

    const MvueCall& call_;
    int n_, m_;
    Output out_;
    Estimate estimate_;
    int chunk_, strip_, bits_;
    PhiloxLanes philox_;
    int64_t groups_, kept_, bytes_;
    bool stream_;
};

void walk(const MvueCall& call, int dtype, int n, int m, const Output& out, int threads) {
    check_pattern(n, m);
    if (call.approx && n != 2) throw std::invalid_argument("the approximate sampler draws two elements, so n must be 2");
    by_dtype(dtype, [&](auto element) { Walk<decltype(element)>(call, n, m, out).run(threads); });
}

}  // namespace

namespace NM_ISA {

void mvue(const MvueCall& call, int dtype, int n, int m, void* out, int threads) {
    walk(call, dtype, n, m, Output{out, nullptr, nullptr}, threads);
}

void mvue_compress(const MvueCall& call, int dtype, int n, int m, void* values, uint8_t* indices, int threads) {
    walk(call, dtype, n, m, Output{nullptr, values, indices}, threads);
}

}  // namespace NM_ISA
}  // namespace nm
