// Philox4x32-7 (core/philox.h) for kLanes counters at once, and the uniforms of groups that advance side by side.
#pragma once

#include "../../core/philox.h"
#include "simd/simd.h"

namespace nm {
namespace {

struct LaneWords {
    Uints w[4];
};

constexpr uint32_t kKeyStep0 = 0x9E3779B9u, kKeyStep1 = 0xBB67AE85u;

// Even and odd counters live in the lower halves of the 64-bit lanes of two states. The upper halves hold rubbish, which
// nothing reads: a product is of lower halves, and its own upper half is shifted down. No word is ever moved about.
struct PhiloxState {
    Longs c0, c1, c2, c3;

    NM_INLINE void round(Longs k0, Longs k1) {
        const Longs a = low_product(c0, Longs(splat(0xD2511F53u))), b = low_product(c2, Longs(splat(0xCD9E8D57u)));
        c0 = xor3(c1, b >> 32, k0);
        c1 = b;
        c2 = xor3(c3, a >> 32, k1);
        c3 = a;
    }
};

NM_INLINE Uints interleaved(Longs even, Longs odd) { return Uints((even & 0xffffffffu) | (odd << 32)); }

class PhiloxLanes {
  public:
    PhiloxLanes(uint64_t seed, uint64_t offset) : c2_(Longs(splat(uint32_t(offset)))), c3_(Longs(splat(uint32_t(offset >> 32)))) {
        for (uint32_t i = 0; i < kPhiloxRounds; ++i) {
            key0_[i] = Longs(splat(uint32_t(seed) + i * kKeyStep0));
            key1_[i] = Longs(splat(uint32_t(seed >> 32) + i * kKeyStep1));
        }
    }

    // The blocks at the counters whose words are lo and hi.
    NM_INLINE LaneWords operator()(Uints lo, Uints hi) const {
        PhiloxState even{Longs(lo), Longs(hi), c2_, c3_}, odd{Longs(lo) >> 32, Longs(hi) >> 32, c2_, c3_};
        NM_UNROLL_8 for (int i = 0; i < kPhiloxRounds; ++i) {
            even.round(key0_[i], key1_[i]);
            odd.round(key0_[i], key1_[i]);
        }
        return LaneWords{{interleaved(even.c0, odd.c0), interleaved(even.c1, odd.c1), interleaved(even.c2, odd.c2), interleaved(even.c3, odd.c3)}};
    }

  private:
    Longs c2_, c3_, key0_[kPhiloxRounds], key1_[kPhiloxRounds];
};

// A 64-bit number per lane that counts up.
struct LaneCounter {
    Uints lo, hi;

    // lane l starts at (first + l * step) >> shift
    LaneCounter(int64_t first, int64_t step, int shift) {
        for (int l = 0; l < kLanes; ++l) {
            const uint64_t j = uint64_t(first + l * step) >> shift;
            lo[l] = uint32_t(j);
            hi[l] = uint32_t(j >> 32);
        }
    }

    NM_INLINE void next() {
        lo += 1;
        hi += choose(nonzero(lo), splat(0u), splat(1u));
    }
};

// Words of the groups first + l * step, first + l * step + 1, ...: group j has word j & 3 of block j >> 2, four at a time.
class OneEach {
  public:
    OneEach(const PhiloxLanes& philox, int64_t first, int64_t step) : philox_(philox), block_(first, step, 2) {
        Uints phase;
        for (int l = 0; l < kLanes; ++l) phase[l] = uint32_t(first + l * step) & 3u;
        by_one_ = nonzero(phase & 1u);
        by_two_ = nonzero(phase & 2u);
        aligned_ = !any(nonzero(phase));
        if (!aligned_) ahead_ = block();
    }

    NM_INLINE LaneWords next_four() {
        if (aligned_) return block();
        const LaneWords next = block();
        Uints shifted[6];
        for (int i = 0; i < 6; ++i) shifted[i] = choose(by_one_, i < 3 ? ahead_.w[i + 1] : next.w[i - 3], i < 4 ? ahead_.w[i] : next.w[i - 4]);
        LaneWords words;
        for (int i = 0; i < 4; ++i) words.w[i] = choose(by_two_, shifted[i + 2], shifted[i]);
        ahead_ = next;
        return words;
    }

  private:
    NM_INLINE LaneWords block() {
        const LaneWords words = philox_(block_.lo, block_.hi);
        block_.next();
        return words;
    }

    const PhiloxLanes& philox_;
    LaneCounter block_;
    Flags by_one_, by_two_;
    bool aligned_;
    LaneWords ahead_;  // the block before block_, where groups do not start at word 0
};

}  // namespace
}  // namespace nm
