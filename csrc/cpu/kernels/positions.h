// Between the positions of stored elements, a byte each, and the bits of 64 elements.
#pragma once

#include <cstring>

#include "simd/simd.h"

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

// The packed positions that eight bits stand for, of groups that divide them. Each half of a byte adds its own: as a group
// keeps N, those of the upper half end where the positions of their group end.
template <int N, int M>
struct Codes {
    static constexpr int kBits = 8 / M * N * (M <= 4 ? 2 : 4);  // of packed positions
    static constexpr bool kWhole = 8 % M == 0 && (kBits == 4 || kBits % 8 == 0) && kBits <= 16;

    // of the half that is lower in the byte, of the other one; their lower and upper eight bits
    alignas(16) uint8_t of[2][2][16];

    constexpr Codes() : of() {
        constexpr int each = M <= 4 ? 2 : 4;
        for (int half = 0; half < 16; ++half) {
            uint32_t low = 0, high = 0;
            int set = 0;
            for (int i = 0; i < 4; ++i) set += half >> i & 1;
            if (each * set > kBits) continue;  // so many are never kept
            for (int i = 0, at = 0; i < 4; ++i) {
                if ((half >> i & 1) == 0) continue;
                low |= uint32_t(i % M) << at;
                high |= uint32_t((i + 4) % M) << (kBits - each * set + at);
                at += each;
            }
            of[0][0][half] = uint8_t(low);
            of[0][1][half] = uint8_t(low >> 8);
            of[1][0][half] = uint8_t(high);
            of[1][1][half] = uint8_t(high >> 8);
        }
    }

    // Those of `words` words of 64 bits. Works on four words at a time: reads and writes as if their number were rounded up.
    void pack(const uint64_t* bits, int64_t words, uint8_t* out) const {
#if defined(__AVX2__)
        const auto table = [&](int half, int byte) {
            return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(of[half][byte])));
        };
        const __m256i fifteen = _mm256_set1_epi8(15);
        for (int64_t i = 0; i < words; i += 4, out += 4 * kBits) {
            const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + i));
            const __m256i low = _mm256_and_si256(x, fifteen), high = _mm256_and_si256(_mm256_srli_epi16(x, 4), fifteen);
            const auto code = [&](int byte) {
                return _mm256_or_si256(_mm256_shuffle_epi8(table(0, byte), low), _mm256_shuffle_epi8(table(1, byte), high));
            };
            if constexpr (kBits == 8) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), code(0));
            } else if constexpr (kBits == 4) {  // of two bytes each, the second four bits up
                const __m256i pairs = _mm256_maddubs_epi16(code(0), _mm256_set1_epi16(0x1001));
                const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
                _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(both));
            } else {
                const __m256i a = _mm256_unpacklo_epi8(code(0), code(1)), b = _mm256_unpackhi_epi8(code(0), code(1));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(a, b, 0x20));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), _mm256_permute2x128_si256(a, b, 0x31));
            }
        }
#else
        for (int64_t i = 0; i < words; ++i) {
            for (int at = 0; at < 64; at += 16, out += kBits / 4) {
                uint32_t both = 0;
                for (int byte = 0; byte < 2; ++byte) {
                    const unsigned x = bits[i] >> (at + 8 * byte) & 0xff, low = x & 15, high = x >> 4;
                    both |= uint32_t((of[0][0][low] | of[1][0][high]) | (of[0][1][low] | of[1][1][high]) << 8) << (kBits * byte);
                }
                std::memcpy(out, &both, kBits / 4);
            }
        }
#endif
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
        const __m512i stored = _mm512_loadu_si512(positions), next = _mm512_loadu_si512(positions + 1);
        __m512i from = first_;
        found = 0;
        for (int k = 0; k < n_; ++k) {
            found |= _mm512_cmpeq_epi8_mask(_mm512_permutexvar_epi8(from, stored), place_);
            from = _mm512_add_epi8(from, _mm512_set1_epi8(1));
        }
        const uint64_t ascending = _mm512_cmplt_epu8_mask(stored, next), inside = _mm512_cmplt_epu8_mask(stored, _mm512_set1_epi8(char(m_)));
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
