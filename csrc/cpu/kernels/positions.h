// Between the positions of stored elements, a byte each, and the bits of 64 elements.
#pragma once

#include <cstring>

#include "../../core/types.h"
#include "pack.h"

namespace nm {
namespace {

// The position of each element in its group, at every phase of a 64-element window.
class Ring {
  public:
    explicit Ring(int m) : m_(m), step_(64 % m) {
        for (int i = 0; i < kMaxM + 64; ++i) position_[i] = uint8_t(i % m);
    }

    // The positions of 64 elements, the first of which is the `phase`-th of its group.
    const uint8_t* from(int phase) const { return position_ + phase; }

    // The phase 64 elements on.
    int next(int phase) const {
        phase += step_;
        return phase < m_ ? phase : phase - m_;
    }

  private:
    int m_, step_;
    uint8_t position_[kMaxM + 64];
};

// The packed positions that eight bits stand for, of groups that divide them, by the byte that these are.
template <int N, int M>
struct Codes {
    static constexpr int kBits = 8 / M * N * (M <= 4 ? 2 : 4);  // of packed positions
    static constexpr bool kWhole = 8 % M == 0 && (kBits == 4 || kBits % 8 == 0) && kBits <= 16;

    uint16_t of[256];

    constexpr Codes() : of() {
        for (int byte = 0; byte < 256; ++byte) {
            int at = 0;
            for (int i = 0; i < 8; ++i) {
                if ((byte >> i & 1) == 0 || at >= kBits) continue;  // too many are never kept
                of[byte] = uint16_t(of[byte] | (i % M) << at);
                at += M <= 4 ? 2 : 4;
            }
        }
    }

    // Those of 64 bits; returns where the next go.
    uint8_t* pack(uint64_t bits, uint8_t* out) const {
        for (int i = 0; i < 64; i += 16) {
            const uint32_t low = of[bits >> i & 0xff], high = of[bits >> (i + 8) & 0xff], both = low | high << kBits;
            std::memcpy(out, &both, kBits / 4);
            out += kBits / 4;
        }
        return out;
    }
};

// The bits of `count` bools; those past the end are 0.
inline void bits_of_mask(const uint8_t* flags, int64_t count, uint64_t* bits) {
    const int64_t words = count / 64, rest = count % 64;
    for (int64_t i = 0; i < words; ++i) bits[i] = bits_of(flags + 64 * i);
    if (rest == 0) return;
    uint8_t padded[64] = {};
    std::memcpy(padded, flags + 64 * words, size_t(rest));
    bits[words] = bits_of(padded);
}

inline int bit_at(const uint64_t* bits, int64_t i) { return int((bits[i / 64] >> (i % 64)) & 1); }

// Whether each field of m bits holds n set ones; m divides 64.
inline bool all_hold(uint64_t bits, int n, int m) {
    constexpr uint64_t low[] = {0x5555555555555555u, 0x3333333333333333u, 0x0f0f0f0f0f0f0f0fu, 0x00ff00ff00ff00ffu, 0x0000ffff0000ffffu,
                                0x00000000ffffffffu};  // the low halves of fields of 2, 4 .. 64 bits
    uint64_t counts = bits, wanted = uint64_t(n);
    for (int step = 0; (1 << step) < m; ++step) counts = (counts & low[step]) + ((counts >> (1 << step)) & low[step]);
    for (int width = m; width < 64; width *= 2) wanted |= wanted << width;
    return counts == wanted;
}

// stored = kept, and in groups with fewer than n the lowest unkept elements too. False: a group keeps more than n.
inline bool fill_groups(const uint64_t* kept, int64_t count, int n, int m, uint64_t* stored) {
    const int64_t step = 64 % m == 0 ? 64 : m;
    std::memcpy(stored, kept, size_t((count + 63) / 64) * sizeof *stored);
    for (int64_t at = 0; at < count; at += step) {
        if (step == 64 && at + 64 <= count && all_hold(kept[at / 64], n, m)) continue;
        const int64_t end = at + step < count ? at + step : count;
        for (int64_t g = at; g < end; g += m) {
            int missing = n;
            for (int i = 0; i < m; ++i) missing -= bit_at(kept, g + i);
            if (missing < 0) return false;
            for (int i = 0; missing > 0; ++i) {
                const int unkept = 1 - bit_at(kept, g + i);
                stored[(g + i) / 64] |= uint64_t(unkept) << ((g + i) % 64);
                missing -= unkept;
            }
        }
    }
    return true;
}

// From the n positions in each group of m to the bits of 64 elements; m divides 64.
class Positions {
  public:
    Positions(int n, int m) : n_(n), m_(m) {
#if defined(__AVX512VBMI__)
        if (64 % m) return;
        alignas(64) uint8_t first[64], place[64];
        for (int i = 0; i < 64; ++i) {
            first[i] = uint8_t(i / m * n);
            place[i] = uint8_t(i % m);
            const uint64_t bit = uint64_t(1) << i;
            if (i < 64 / m * n) all_ |= bit;
            if (i < 64 / m * n && i % n != n - 1) followed_ |= bit;
        }
        first_ = _mm512_load_si512(first);
        place_ = _mm512_load_si512(place);
#endif
    }

    // False unless the positions ascend in each group and are below m. Reads 65 bytes.
    bool bits(const uint8_t* positions, uint64_t& found) const {
#if defined(__AVX512VBMI__)
        const __m512i given = _mm512_loadu_si512(positions), next = _mm512_loadu_si512(positions + 1);
        __m512i from = first_;
        found = 0;
        for (int k = 0; k < n_; ++k) {
            found |= _mm512_cmpeq_epi8_mask(_mm512_permutexvar_epi8(from, given), place_);
            from = _mm512_add_epi8(from, _mm512_set1_epi8(1));
        }
        const uint64_t ascending = _mm512_cmplt_epu8_mask(given, next), inside = _mm512_cmplt_epu8_mask(given, _mm512_set1_epi8(char(m_)));
        return (ascending & followed_) == followed_ && (inside & all_) == all_;
#else
        found = 0;
        bool good = true;
        for (int g = 0; g < 64; g += m_, positions += n_) {
            int before = -1;
            for (int k = 0; k < n_; ++k) {
                const int position = positions[k];
                good &= position > before;
                before = position;
                found |= uint64_t(1) << ((g + position) & 63);
            }
            good &= before < m_;
        }
        return good;
#endif
    }

  private:
    int n_, m_;
#if defined(__AVX512VBMI__)
    __m512i first_, place_;
    uint64_t all_ = 0, followed_ = 0;
#endif
};

}  // namespace
}  // namespace nm
