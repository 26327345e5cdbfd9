// MVUE of one group, exactly as core/mvue.h says, for any N:M: K consecutive elements in each of the lanes of a team.
//
// A team of one lane may run in divergent code; with more lanes, the whole warp must be converged. Elements past M are zeros, which
// change nothing.
#pragma once

#include "../core/mvue.h"
#include "platform.h"

namespace nm::cuda {

struct Alone {
    static constexpr int width = 1;
    NM_DEVICE int lane() const { return 0; }
    NM_DEVICE float tree(float x) const { return x; }
    NM_DEVICE uint32_t sum(uint32_t x) const { return x; }
    NM_DEVICE uint32_t before(uint32_t) const { return 0; }
    NM_DEVICE int most(int x) const { return x; }
    NM_DEVICE float from(float x, int) const { return x; }
    NM_DEVICE bool anybody(bool x) const { return x; }
};

// `width` neighbouring lanes, a power of two; each gets the result of a reduction.
struct Team {
    int width;

    NM_DEVICE int lane() const { return int(threadIdx.x) & (width - 1); }
    // neighbours first: the balanced tree over the index; addition is commutative
    NM_DEVICE float tree(float x) const {
        for (int w = 1; w < width; w *= 2) x = x + __shfl_xor_sync(~0u, x, w);
        return x;
    }
    NM_DEVICE uint32_t sum(uint32_t x) const {
        for (int w = 1; w < width; w *= 2) x += __shfl_xor_sync(~0u, x, w);
        return x;
    }
    // The sum over the lanes of the team before this one.
    NM_DEVICE uint32_t before(uint32_t x) const {
        uint32_t running = x;
        for (int w = 1; w < width; w *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, running, unsigned(w));
            running += lane() >= w ? other : 0u;
        }
        return running - x;
    }
    NM_DEVICE int most(int x) const {
        for (int w = 1; w < width; w *= 2) {
            const int other = __shfl_xor_sync(~0u, x, w);
            x = other > x ? other : x;
        }
        return x;
    }
    NM_DEVICE float from(float x, int lane) const { return __shfl_sync(~0u, x, lane, width); }
    // Whether it holds in any lane of the warp.
    NM_DEVICE bool anybody(bool x) const { return __any_sync(~0u, x) != 0; }
};

// The outcome for this lane's K elements: bit i is element i.
struct Fates {
    uint32_t kept, sampled, poisoned;
};

template <int K, class Lanes>
struct Shared {
    Lanes lanes;
    float a[K];        // magnitudes
    float value[K];    // the magnitude of what is sampled

    // S over the elements of `open`.
    NM_DEVICE float sum_of(uint32_t open) const {
        float x[K];
        NM_UNROLL
        for (int i = 0; i < K; ++i) x[i] = open >> i & 1u ? a[i] : 0.0f;
        NM_UNROLL
        for (int step = 1; step < K; step *= 2) {
            NM_UNROLL
            for (int i = 0; i + step < K; i += 2 * step) x[i] = x[i] + x[i + step];
        }
        return lanes.tree(x[0]);
    }

    NM_DEVICE uint32_t non_zeros() const {
        uint32_t bits = 0;
        NM_UNROLL
        for (int i = 0; i < K; ++i) bits |= uint32_t(a[i] != 0.0f) << i;
        return bits;
    }

    // The mask of the group: its n largest, ties keep the lower index.
    NM_DEVICE uint32_t largest(int n) const {
        uint32_t keys[K], found = 0;
        NM_UNROLL
        for (int i = 0; i < K; ++i) keys[i] = Key<float>::of(a[i]);
        for (int bit = Key<float>::bits - 1; bit >= 0; --bit) {
            const uint32_t candidate = found | 1u << bit;
            uint32_t at_least = 0;
            NM_UNROLL
            for (int i = 0; i < K; ++i) at_least += keys[i] >= candidate;
            if (lanes.sum(at_least) >= uint32_t(n)) found = candidate;
        }
        uint32_t above = 0, ties = 0;
        NM_UNROLL
        for (int i = 0; i < K; ++i) {
            above |= uint32_t(keys[i] > found) << i;
            ties |= uint32_t(keys[i] == found) << i;
        }
        uint32_t missing = uint32_t(n) - lanes.sum(uint32_t(__popc(above))), first = lanes.before(uint32_t(__popc(ties)));
        missing = missing > first ? missing - first : 0u;
        NM_UNROLL
        for (int i = 0; i < K; ++i) {
            if ((ties >> i & 1u) && missing > 0) {
                above |= 1u << i;
                --missing;
            }
        }
        return above;
    }

    // Handles the cases without sampling, all lanes together: `open` becomes false if the group is done.
    NM_DEVICE Fates settled(int n, float sum, uint32_t present, bool& open) const {
        Fates fates{0, 0, 0};
        const bool finite = is_finite(sum), few = lanes.sum(uint32_t(__popc(present))) <= uint32_t(n);
        if (finite && few) fates.kept = present;
        open = finite && !few;
        if (lanes.anybody(!finite)) {
            const uint32_t mask = largest(n);
            if (!finite) fates.poisoned = mask;
        }
        return fates;
    }

    // By level, if a lane has the whole group (K >= m); T is the type of g.
    template <class T>
    NM_DEVICE Fates by_level(int n, int m, uint32_t word) {
        const uint32_t present = non_zeros();
        const float sum = sum_of(present);
        bool open;
        Fates fates = settled(n, sum, present, open);
        if (!open) return fates;
        // running sum, and least sum without one element; zeros past m change neither
        float all[K], rest[K];
        NM_UNROLL
        for (int i = 0; i < K; ++i) all[i] = a[i], rest[i] = 0.0f;
        NM_UNROLL
        for (int step = 1; step < K; step *= 2) {
            NM_UNROLL
            for (int i = 0; i + step < K; i += 2 * step) {
                const float left = rest[i] + all[i + step], right = all[i] + rest[i + step];
                rest[i] = left < right ? left : right;
                all[i] = all[i] + all[i + step];
            }
        }
        const float half = 0.5f * sum, h = n == 1 ? sum : rest[0] < half ? rest[0] : half;
        const float up = h < kLeastLevel ? kLevelScale : h >= kMostLevel ? 1.0f / kLevelScale : 1.0f;
        const float level = level_grid(h * up), base = level_base(level);
        const float second = base + level_mark(word, m) * level, first = second - level;
        int one = 0, two = 1;
        float c = base;
        NM_UNROLL
        for (int i = 0; i < K; ++i) {
            const float x = a[i] * up;
            c = c + (x < level ? x : level);
            one += i < m - 1 && c <= first;
            two += i > 0 && i < m - 1 && c <= second;
        }
        fates.sampled = 1u << one | (n == 2 ? 1u << two : 0u);
        const float rounded = rounded_level<T>(level * (1.0f / up), word);
        NM_UNROLL
        for (int i = 0; i < K; ++i) value[i] = a[i] > rounded ? a[i] : rounded;
        return fates;
    }

    // In integers, by a 24-bit uniform.
    NM_DEVICE Fates in_integers(int n, uint32_t u) {
        const uint32_t present = non_zeros();
        float sum = sum_of(present);
        bool open;
        Fates fates = settled(n, sum, present, open);
        int room = n;
        for (bool grew = open; lanes.anybody(grew);) {
            const float left = float(room);
            uint32_t more = 0;
            NM_UNROLL
            for (int i = 0; i < K; ++i) more |= uint32_t(a[i] * left >= sum) << i;
            more &= open && room > 0 ? present & ~fates.kept : 0u;
            fates.kept |= more;
            const int here = int(lanes.sum(uint32_t(__popc(more))));
            room -= here;
            grew = here > 0;
            const float rest = sum_of(present & ~fates.kept);
            sum = open ? rest : sum;
        }
        sample(open && room > 0 ? present & ~fates.kept : 0u, room, sum, u, fates);
        return fates;
    }

    // Systematic sampling of the elements of `live`. N 2^24 and what rounding adds stay below 2^32.
    NM_DEVICE void sample(uint32_t live, int room, float sum, uint32_t u, Fates& fates) {
        const uint32_t total = uint32_t(room) << 24;
        const float left = float(room);
        uint32_t q[K], all = 0;
        NM_UNROLL
        for (int i = 0; i < K; ++i) {
            q[i] = live >> i & 1u ? uint32_t(((a[i] * left) / sum) * kTwo24) : 0u;
            all += q[i];
        }
        uint32_t running = lanes.before(all);
        const int first = lanes.lane() * K, last = lanes.most(live ? first + 31 - __clz(live) : -1);
        NM_UNROLL
        for (int i = 0; i < K; ++i) {
            const uint32_t start = running < total ? running : total;
            running += q[i];
            const uint32_t end = running < total && first + i != last ? running : total;
            const uint64_t shift = uint64_t(kOne24) - u;
            fates.sampled |= uint32_t((end + shift) >> 24 > (start + shift) >> 24) << i;
            value[i] = sum / left;
        }
        fates.sampled &= live;
    }

    // Index in the group of the element of `among` that u draws, each with probability a / sum.
    NM_DEVICE int draw(uint32_t among, float sum, uint32_t u) const {
        uint32_t q[K], all = 0, passed = 0;
        NM_UNROLL
        for (int i = 0; i < K; ++i) {
            q[i] = among >> i & 1u ? uint32_t((a[i] / sum) * kTwo24) : 0u;
            all += q[i];
        }
        uint32_t running = lanes.before(all);
        const int first = lanes.lane() * K, last = lanes.most(among ? first + 31 - __clz(among) : 0);
        NM_UNROLL
        for (int i = 0; i < K; ++i) {
            running += q[i];
            passed += u >= running && first + i < last;
        }
        return int(lanes.sum(passed));
    }

    // The bit of the element at an index of the group, if this lane has it.
    NM_DEVICE uint32_t bit_of(int index) const { return index / K == lanes.lane() ? 1u << (index % K) : 0u; }

    // Two draws without replacement; the value of each is divided by its probability.
    NM_DEVICE Fates approx(int m, uint32_t u0, uint32_t u1) {
        const uint32_t present = non_zeros();
        const float sum = sum_of(present);
        bool open;
        Fates fates = settled(2, sum, present, open);
        if (!lanes.anybody(open)) return fates;
        const int one = draw(present, sum, u0);
        const uint32_t others = present & ~bit_of(one);
        const int two = draw(others, sum_of(others), u1);
        float p[K];
        NM_UNROLL
        for (int i = 0; i < K; ++i) p[i] = a[i] / sum;
        for (int j = 0; j < m; ++j) {
            const uint32_t skipped = bit_of(j);
            const float rest = sum_of(present & ~skipped);
            float mine = 0.0f;
            NM_UNROLL
            for (int i = 0; i < K; ++i) mine = skipped >> i & 1u ? a[i] : mine;
            const float t = lanes.from(mine, j / K) / sum;
            NM_UNROLL
            for (int i = 0; i < K; ++i) p[i] = skipped >> i & 1u ? p[i] : p[i] + (a[i] / rest) * t;
        }
        const float floor = 1.0f / kTwo24;
        NM_UNROLL
        for (int i = 0; i < K; ++i) value[i] = a[i] / (p[i] < floor ? floor : p[i]);
        fates.sampled = open ? bit_of(one) | bit_of(two) : 0u;
        return fates;
    }

    // Element i of the estimate of g.
    template <class T>
    NM_DEVICE T result(const Fates& fates, int i, T g) const {
        if (fates.kept >> i & 1u) return g;
        if (fates.sampled >> i & 1u) return from_float<T>(with_sign(value[i], to_float(g)));
        return fates.poisoned >> i & 1u ? from_float<T>(bits_float(0x7fc00000u)) : T{};
    }
};

}  // namespace nm::cuda
