// Rows of stored integers times digits of x, with VNNI: the digits that 64 stored values choose are permuted in registers. Unsigned
// upper digits have 128 added, which the sum of the integers takes off again.
#pragma once

#include "digits.h"
#include "integer_values.h"
#include "patterns.h"

#if defined(__AVX512VBMI2__) && defined(__AVX512VNNI__)
#define NM_DIGITS 1

namespace nm {
namespace {

constexpr int64_t kMostKept = 1 << 19;  // in a row: its sums fit 32 bits
// Bytes: how far ahead values are prefetched, and into which caches; what the two kinds of machine like (a Sapphire Rapids and a Zen 4).
#if defined(__AMX_BF16__)
constexpr int kAhead = 8192;
constexpr auto kHint = _MM_HINT_T0;
#else
constexpr int kAhead = 2048;
constexpr auto kHint = _MM_HINT_NTA;
#endif

// The lowest byte of each lane.
NM_INLINE void store_lowest_bytes(uint8_t* to, Uints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(Register(x)));
}

// Digits of tokens [token, token + tokens). `Signed`: both from -128 to 127; else from 0 to 255, the upper one with 128 added.
template <bool Signed>
void make_digits(const IntegersLinearCall& call, int64_t token, int64_t tokens, Digits& digits, int threads) {
    constexpr float kMost = 127 * 256 + 127;  // both digits may be signed
    const int64_t width = digits.width;
    each_token(call, token, tokens, kMost, digits, threads, [&](int64_t t, const float* x, float inverse) {
        uint8_t *upper = digits.planes + t * 2 * width, *lower = upper + width;
        for (int64_t i = 0; i < width; i += kLanes) {
            // next to 1.5 * 2^23, whose ulp is 1, a number is rounded, and its lowest bits are the integer's
            const Uints whole = bits_of(load(x + i) * inverse + 12582912.0f);
            store_lowest_bytes(lower + i, whole);
            store_lowest_bytes(upper + i, Signed ? (whole + 128u) >> 8 : (whole >> 8) + 128u);
        }
    });
}

// The halves of 32 bytes as 64 bytes, in order.
NM_INLINE Register halves_of(__m256i packed) {
    const Register wide = _mm512_cvtepu8_epi16(packed);
    return _mm512_ternarylogic_epi32(wide, _mm512_slli_epi16(wide, 4), _mm512_set1_epi8(15), 0xa8);  // (a | b) & c
}

// 32 bytes of halves as 64 bytes, each 16 times the integer that the half stands for.
NM_INLINE Register sixteenfold(__m256i packed) {
    static constexpr auto distance = [](int i) { return (i % 8 * 4 + 60) % 64; };
    static constexpr Table<uint8_t, decltype(distance)> distances(distance);
    const Register shifted = _mm512_multishift_epi64_epi8(distances.template as<Register>(), _mm512_cvtepu32_epi64(packed));
    return _mm512_and_si512(shifted, _mm512_set1_epi8(char(0xf0)));
}

NM_INLINE uint64_t first_bits(int64_t count) { return _bzhi_u64(~uint64_t(0), unsigned(std::min<int64_t>(std::max<int64_t>(count, 0), 64))); }
NM_INLINE __m256i load_first(const uint8_t* from, int64_t bytes) { return _mm256_maskz_loadu_epi8(__mmask32(first_bits(bytes)), from); }

// 64 stored values from place k on of a row, those of 4 bits times 16; `left` of them there are, fewer if `Tail`.
template <int Bits, bool Tail>
NM_INLINE Register stored64(const uint8_t* row, int64_t k, int64_t left) {
    if constexpr (Bits == 8) return Tail ? _mm512_maskz_loadu_epi8(first_bits(left), row + k) : _mm512_loadu_si512(row + k);
    const __m256i packed = Tail ? load_first(row + k / 2, (left + 1) / 2) : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k / 2));
    return sixteenfold(packed);
}

// Where the digits lie that 64 stored values choose, and picking them: each from two registers of 64 columns at a time.
template <int N, int M>
struct Choice64 {
    static constexpr int kPairs = M / N / 2, kShare = 64 / kPairs, kBits = M <= 4 ? 2 : 4, kBytes = 8 * kBits, kColumns = 128 * kPairs;
    static_assert(M % (2 * N) == 0);

    // Each in the 128 columns that its group is among; of positions past M, `damage` gets bits.
    template <bool Tail>
    NM_INLINE static Register places(const uint8_t* packed, int64_t bytes, [[maybe_unused]] Register& damage) {
        static constexpr auto group_of = [](int k) { return k / N * M % 128; };
        static constexpr Table<uint8_t, decltype(group_of)> groups(group_of);
        if constexpr (kBits == 2) {
            static constexpr auto distance = [](int i) { return i / 8 % 4 * 16 + i % 8 * 2; };
            static constexpr Table<uint8_t, decltype(distance)> distances(distance);
            uint8_t last[16] = {};
            if (Tail) std::memcpy(last, packed, size_t(std::min<int64_t>(bytes, 16)));
            const auto* halves = reinterpret_cast<const __m128i*>(Tail ? last : packed);
            const Register first = _mm512_broadcastq_epi64(_mm_loadl_epi64(halves));
            const auto* upper = reinterpret_cast<const __m128i*>(reinterpret_cast<const uint8_t*>(halves) + 8);
            const Register spread = _mm512_mask_broadcastq_epi64(first, 0xf0, _mm_loadl_epi64(upper));
            const Register shifted = _mm512_multishift_epi64_epi8(distances.template as<Register>(), spread);
            return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi8(3), groups.template as<Register>(), 0xea);  // a & b | c
        } else {
            const Register halves = halves_of(Tail ? load_first(packed, bytes) : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)));
            if constexpr (M < 16) damage = _mm512_or_si512(damage, halves);
            return _mm512_ternarylogic_epi32(halves, _mm512_set1_epi8(M < 16 ? 7 : 15), groups.template as<Register>(), 0xea);
        }
    }

    static bool valid(Register damage) { return kBits == 2 || M == 16 || _mm512_test_epi8_mask(damage, _mm512_set1_epi8(8)) == 0; }

    // Those of one plane that each row chooses.
    template <int Rows>
    NM_INLINE static void choose(const uint8_t* digits, const Register (&places)[Rows], Register (&chosen)[Rows]) {
        each<kPairs>([&](auto i) __attribute__((always_inline)) {
            const Register low = _mm512_loadu_si512(digits + i * 128), high = _mm512_loadu_si512(digits + i * 128 + 64);
            each<Rows>([&](auto r) __attribute__((always_inline)) {
                const Register some = _mm512_permutex2var_epi8(low, places[r], high);
                if constexpr (i == 0) chosen[r] = some;
                else chosen[r] = _mm512_mask_mov_epi8(chosen[r], ~uint64_t(0) << i * kShare, some);
            });
        });
    }
};

// Of a dense row: the 64 digits at the same place.
template <>
struct Choice64<1, 1> {
    static constexpr int kBits = 0, kBytes = 0, kColumns = 64;

    template <bool Tail>
    NM_INLINE static Register places(const uint8_t*, int64_t, Register&) {
        return _mm512_setzero_si512();
    }

    static bool valid(Register) { return true; }

    template <int Rows>
    NM_INLINE static void choose(const uint8_t* digits, const Register (&)[Rows], Register (&chosen)[Rows]) {
        const Register some = _mm512_loadu_si512(digits);
        for (int r = 0; r < Rows; ++r) chosen[r] = some;
    }
};

// A row is summed in segments of whole blocks of 64 stored values, in 32 bits; each sum is then multiplied with its step: that of the
// row, of the segment, or, where a step is for fewer than 64 values, that of each lane of four.
struct RowSteps {
    static constexpr int64_t kBlocks = 4096;  // so many blocks' sums fit 32 bits

    bool one;
    int64_t each, blocks;  // steps of a block, if several; blocks of a segment
    Register lanes;        // the step of each lane

    RowSteps(const Integers& w) : one(w.steps == 1), each(0), blocks(kBlocks), lanes(_mm512_setzero_si512()) {
        if (one) return;
        const int64_t run = w.kept / w.steps;
        each = run < 64 ? 64 / run : 0;
        blocks = std::max<int64_t>(1, run / 64);
        static constexpr auto first = [](int l) { return 4 * l; };
        static constexpr Table<uint32_t, decltype(first)> firsts(first);
        if (each) lanes = _mm512_srli_epi32(firsts.template as<Register>(), unsigned(__builtin_ctzll(uint64_t(run))));
    }

    // Whether each segment is so.
    static bool fits(const Integers& w) {
        const int64_t run = w.kept / w.steps;
        return w.steps == 1 ? w.kept <= kMostKept : (run % 64 == 0 && run / 64 <= kBlocks) || (run >= 4 && run < 64 && 64 % run == 0);
    }

    NM_INLINE Floats of(const float* steps, int64_t segment) const {
        if (each) return Floats(_mm512_permutexvar_ps(lanes, _mm512_loadu_ps(steps + segment * each)));
        return splat(steps[one ? 0 : segment]);
    }
};

// A row's steps in fp32, and zeros after them.
inline const float* wide_steps(const Integers& w, int64_t row, float* room) {
    to_floats(w.step + row * w.steps, w.steps, room);
    std::memset(room + w.steps, 0, kLanes * sizeof(float));
    return room;
}

// The sums of `Rows` rows from `row` on for `Tokens` tokens, to sums[t * stride + r]. `Short`: a segment is one block. False: an index
// is not below M.
template <int N, int M, int Bits, int Rows, int Tokens, bool Short>
bool permuted(const Integers& w, const uint8_t* indices, const Digits& x, int64_t token, int64_t row, float* steps_room, float* sums,
              int64_t stride) {
    using Choice = Choice64<N, M>;
    const RowSteps steps(w);
    const int64_t index_row = index_bytes(w.kept, Choice::kBits), whole = w.kept / 64, blocks = (w.kept + 63) / 64;
    const Register offset = _mm512_set1_epi8(char(128));
    Register damage = _mm512_setzero_si512();
    const uint8_t *values[Rows], *packed[Rows];
    const float* wide[Rows];
    Floats total[Rows][Tokens] = {};
    for (int r = 0; r < Rows; ++r) {
        values[r] = stored_row(w, row + r);
        packed[r] = indices + (row + r) * index_row;
        wide[r] = wide_steps(w, row + r, steps_room + r * (w.steps + kLanes));
    }
    const uint8_t* digits = x.upper(token);
    Register upper[Rows][Tokens], lower[Rows][Tokens], integers[Rows];
    const auto open = [&](auto tail, int64_t b, Register (&v)[Rows], Register (&places)[Rows]) __attribute__((always_inline)) {
        each<Rows>([&](auto r) __attribute__((always_inline)) {
            if (!tail) {
                if (Bits == 8 || b % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(values[r] + b * 8 * Bits + kAhead), kHint);
                if (Choice::kBytes && b * Choice::kBytes % 64 == 0) _mm_prefetch(reinterpret_cast<const char*>(packed[r] + b * Choice::kBytes + kAhead / 4), _MM_HINT_T0);
            }
            v[r] = stored64<Bits, tail>(values[r], b * 64, w.kept - b * 64);
            asm("" : "+v"(v[r]));  // or it would be loaded again for every product
            places[r] = Choice::template places<tail>(packed[r] + b * Choice::kBytes, index_row - b * Choice::kBytes, damage);
        });
    };
    const auto plane = [&](int t, int lower_one, int64_t b) __attribute__((always_inline)) {
        return digits + (t * 2 + lower_one) * x.width + b * Choice::kColumns;
    };
    if constexpr (Short) {  // sums of 64 products of 23 bits
        const auto one = [&](auto tail, int64_t b) __attribute__((always_inline)) {
            Register v[Rows], places[Rows], chosen[Rows], minus[Rows];
            open(tail, b, v, places);
            each<Rows>([&](auto r) __attribute__((always_inline)) {
                minus[r] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(_mm512_setzero_si512(), offset, v[r]));
            });
            each<Tokens>([&](auto t) __attribute__((always_inline)) {
                Register sum[Rows];
                Choice::choose(plane(t, 0, b), places, chosen);
                each<Rows>([&](auto r) __attribute__((always_inline)) {
                    sum[r] = _mm512_slli_epi32(_mm512_dpbusd_epi32(minus[r], chosen[r], v[r]), 8);
                });
                Choice::choose(plane(t, 1, b), places, chosen);
                each<Rows>([&](auto r) __attribute__((always_inline)) {
                    sum[r] = _mm512_dpbusd_epi32(sum[r], chosen[r], v[r]);
                    total[r][t] = fused(Floats(_mm512_cvtepi32_ps(sum[r])), steps.of(wide[r], b), total[r][t]);
                });
            });
        };
        int64_t b = 0;
        for (; b < whole; ++b) one(std::false_type(), b);
        if (b < blocks) one(std::true_type(), b);
    } else {
        const auto add = [&](auto tail, int64_t b) __attribute__((always_inline)) {
            Register v[Rows], places[Rows], chosen[Rows];
            open(tail, b, v, places);
            each<Rows>([&](auto r) __attribute__((always_inline)) { integers[r] = _mm512_dpbusd_epi32(integers[r], offset, v[r]); });
            each<Tokens>([&](auto t) __attribute__((always_inline)) {
                Choice::choose(plane(t, 0, b), places, chosen);
                each<Rows>([&](auto r) __attribute__((always_inline)) { upper[r][t] = _mm512_dpbusd_epi32(upper[r][t], chosen[r], v[r]); });
                Choice::choose(plane(t, 1, b), places, chosen);
                each<Rows>([&](auto r) __attribute__((always_inline)) { lower[r][t] = _mm512_dpbusd_epi32(lower[r][t], chosen[r], v[r]); });
            });
        };
        int64_t b = 0;
        for (int64_t segment = 0; b < blocks; ++segment) {
            const int64_t stop = std::min(b + steps.blocks, blocks), full = std::min(stop, whole);
            each<Rows>([&](auto r) __attribute__((always_inline)) {
                integers[r] = _mm512_setzero_si512();
                each<Tokens>([&](auto t) __attribute__((always_inline)) { upper[r][t] = lower[r][t] = _mm512_setzero_si512(); });
            });
            for (; b < full; ++b) add(std::false_type(), b);
            if (b < stop) add(std::true_type(), b++);
            each<Rows>([&](auto r) __attribute__((always_inline)) {
                const Floats step = steps.of(wide[r], segment);
                each<Tokens>([&](auto t) __attribute__((always_inline)) {
                    const Floats high(_mm512_cvtepi32_ps(_mm512_sub_epi32(upper[r][t], integers[r]))), low(_mm512_cvtepi32_ps(lower[r][t]));
                    total[r][t] = fused(fused(high, splat(256.0f), low), step, total[r][t]);
                });
            });
        }
    }
    each<Rows>([&](auto r) __attribute__((always_inline)) {
        each<Tokens>([&](auto t) __attribute__((always_inline)) { sums[t * stride + r] = sum_of_lanes(total[r][t]) * x.scale[token + t]; });
    });
    return Choice::valid(damage);
}

// The same of rows [row, end).
template <int N, int M, int Bits, int Tokens>
bool permuted(const Integers& w, const uint8_t* indices, const Digits& x, int64_t token, int64_t row, int64_t end, float* sums, int64_t stride) {
    static thread_local Scratch room;
    constexpr int kRows = M == 1 ? 4 : Tokens == 1 ? 1 : 2;  // dense rows share what is loaded of x
    float* steps = room.at_least<float>(kRows * (w.steps + kLanes));
    bool valid = true;
    const auto run = [&](auto is_short) {
        int64_t r = 0;
        for (; row + r + kRows <= end; r += kRows) valid &= permuted<N, M, Bits, kRows, Tokens, is_short>(w, indices, x, token, row + r, steps, sums + r, stride);
        for (; row + r < end; ++r) valid &= permuted<N, M, Bits, 1, Tokens, is_short>(w, indices, x, token, row + r, steps, sums + r, stride);
    };
    if (RowSteps(w).blocks == 1) run(std::true_type());
    else run(std::false_type());
    return valid;
}

// Pieces of a row, 512 columns each, expanded to lines of 64 columns.
template <int N, int M, int Bits>
struct Expander {
    static constexpr int kColumns = 512, kLines = 8, kEach = 64 * N / M, kValues = kLines * kEach;
    static constexpr int kIndexBits = M <= 4 ? 2 : 4, kBytes = kValues * kIndexBits / 8;

    const Integers& w;
    const uint8_t* indices;
    int64_t index_row = index_bytes(w.kept, kIndexBits);
    Register damage = _mm512_setzero_si512();  // of indices that do not ascend, or are not below M, lanes get their uppermost bit

    int64_t pieces() const { return (w.kept + kValues - 1) / kValues; }

    // What a piece is expanded from; the row may be past the last.
    template <_mm_hint Hint>
    NM_INLINE void prefetch(int64_t row, int64_t piece) const {
        const uint8_t* values = stored_row(w, row) + piece * kValues * Bits / 8;
        for (int l = 0; l < kValues * Bits / 8; l += 64) _mm_prefetch(reinterpret_cast<const char*>(values + l), Hint);
        _mm_prefetch(reinterpret_cast<const char*>(indices + row * index_row + piece * kBytes), Hint);
    }

    // f(i, line) for the lines of a piece.
    template <class F>
    NM_INLINE void expand(int64_t row, int64_t piece, const F& f) {
        alignas(64) uint64_t masks[kLines];
        alignas(64) int8_t room[kValues];
        alignas(64) uint8_t index_room[64];
        const uint8_t *from = stored_row(w, row) + piece * kValues * Bits / 8, *packed = indices + row * index_row + piece * kBytes;
        const int64_t left = w.kept - piece * kValues;
        const int8_t* values = room;
        if (__builtin_expect(left < kValues, false)) {  // the rest is made of zeros, at indices that are right
            const int64_t bytes = index_row - piece * kBytes;
            std::memset(index_room, M == 4 && N == 2 ? 0x44 : 0, sizeof index_room);
            std::memcpy(index_room, packed, size_t(bytes));
            if (N == 2 && M == 4 && left % 4) index_room[bytes - 1] |= 0x40;
            packed = index_room;
            uint8_t last[kValues * Bits / 8] = {};
            std::memcpy(last, from, size_t(left * Bits + 7) / 8);
            for (int i = 0; i < kValues; i += 64) _mm512_store_si512(room + i, stored64<Bits, false>(last, i, 64));
        } else if (Bits == 8) {
            values = reinterpret_cast<const int8_t*>(from);
        } else {
            for (int i = 0; i < kValues; i += 64) _mm512_store_si512(room + i, stored64<Bits, false>(from, i, 64));
        }
        _mm512_store_si512(masks, masks_of(packed));
        each<kLines>([&](auto i) __attribute__((always_inline)) {
            Register v;
            if constexpr (kEach == 32) v = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i * kEach)));
            else if constexpr (kEach == 16) v = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i * kEach)));
            else v = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + i * kEach)));
            f(i, _mm512_maskz_expand_epi8(masks[i], v));
        });
    }

    bool valid() const { return _mm512_movepi8_mask(damage) == 0; }

  private:
    // A bit for every column that is stored.
    NM_INLINE Register masks_of(const uint8_t* packed) {
        constexpr char kBad = char(0x80);
        if constexpr (N == 2 && M == 4) {  // first | second << 2, as 1 << first | 1 << second
            const __m128i sixteen = _mm_setr_epi8(kBad, kBad, kBad, kBad, 3, kBad, kBad, kBad, 5, 6, kBad, kBad, 9, 10, 12, kBad);
            const Register table = _mm512_broadcast_i32x4(sixteen);
            const Register b = _mm512_loadu_si512(packed), low = _mm512_set1_epi8(15);
            const Register one = _mm512_shuffle_epi8(table, _mm512_and_si512(b, low));
            const Register two = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(b, 4), low));
            damage = _mm512_ternarylogic_epi32(damage, one, two, 0xfe);  // a | b | c
            return _mm512_or_si512(one, _mm512_slli_epi16(_mm512_and_si512(two, low), 4));
        } else {
            const Register halves = halves_of(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)));
            if constexpr (M == 4) {  // two groups of 1:4
                const __m128i table = _mm_setr_epi8(0x11, 0x12, 0x14, 0x18, 0x21, 0x22, 0x24, 0x28, 0x41, 0x42, 0x44, 0x48, kBad | 1, kBad | 2,
                                                    kBad | 4, kBad | 8);
                return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), halves);
            } else {
                const __m128i table = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, kBad, 0, 0, 0, 0, 0, 0, 0, 0);
                damage = _mm512_or_si512(damage, _mm512_slli_epi16(halves, 4));
                return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), halves);
            }
        }
    }
};

// Dense rows are such lines already.
template <int Bits>
struct Expander<1, 1, Bits> {
    static constexpr int kColumns = 512, kLines = 8;

    const Integers& w;
    const uint8_t* indices;

    int64_t pieces() const { return (w.kept + kColumns - 1) / kColumns; }

    template <_mm_hint Hint>
    NM_INLINE void prefetch(int64_t row, int64_t piece) const {
        const uint8_t* values = stored_row(w, row) + piece * kColumns * Bits / 8;
        for (int l = 0; l < kColumns * Bits / 8; l += 64) _mm_prefetch(reinterpret_cast<const char*>(values + l), Hint);
    }

    template <class F>
    NM_INLINE void expand(int64_t row, int64_t piece, const F& f) {
        const uint8_t* from = stored_row(w, row);
        const int64_t first = piece * kColumns, left = w.kept - first;
        if (__builtin_expect(left >= kColumns, true)) {
            each<kLines>([&](auto i) __attribute__((always_inline)) { f(i, stored64<Bits, false>(from, first + i * 64, 64)); });
        } else {
            each<kLines>([&](auto i) __attribute__((always_inline)) {
                f(i, i * 64 < left ? stored64<Bits, true>(from, first + i * 64, left - i * 64) : _mm512_setzero_si512());
            });
        }
    }

    bool valid() const { return true; }
};

}  // namespace
}  // namespace nm

#endif
