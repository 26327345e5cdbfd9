// A tile's packed operand in shared memory, between the threads that pack it and those that write it out: lines of a power of two
// of values, and a byte for each group's indices. A line is written in pieces of 16 bytes of values and 4 of indices, or a whole
// tile of metadata.
#pragma once

#include "pack.h"

namespace nm::cuda {

// The position of a panel in an operand.
struct PanelPlace {
    void* values;
    void* indices;
    unsigned line, group;    // the first of the tile
    unsigned lines, groups;  // remaining ones; fewer than a panel's at the operand's end
    unsigned line_groups;    // per line of the operand
    int layout;
};

// `kStep`: distance between lines that neighbouring threads write; kThreads threads write out.
template <class Out, class P, int kLines, int kGroups, int kStep, int kThreads>
struct Panel {
    static constexpr unsigned kWidth = P::n * (P::m <= 4 ? 2 : 4);           // bits of a group's indices
    static constexpr unsigned kGroupBytes = P::n * unsigned(sizeof(Out));   // of its values
    static constexpr unsigned kPieces = kGroups * kGroupBytes / 16;         // of 16 bytes, in a line
    static constexpr unsigned kIndexBytes = kGroups + 4;                    // per line, padded so that the next one uses other banks
    static_assert((kPieces & (kPieces - 1)) == 0);

    alignas(16) unsigned char values[kLines * kPieces * 16];
    alignas(16) unsigned char indices[kLines * kIndexBytes];

    // Neighbouring threads write different lines, others the next groups: pieces are swizzled within a line by a number that
    // differs between neighbours, to avoid bank conflicts.
    static NM_DEVICE unsigned piece_at(unsigned step, unsigned within, unsigned piece) {
        return (within * (kLines / kStep) + step) * kPieces + (piece ^ (step & (kPieces - 1)));
    }

    // Stores values of the groups from `group` on in line step * kStep + within.
    template <int kBytes>
    NM_DEVICE void put(unsigned step, unsigned within, unsigned group, const uint32_t* words) {
        const unsigned at = group * kGroupBytes;
        Word<kBytes> word;
        memcpy(&word, words, kBytes);
        store_word<kBytes>(values + piece_at(step, within, at / 16) * 16 + at % 16, word);
    }

    template <int kCount>
    NM_DEVICE void put_indices(unsigned step, unsigned within, unsigned group, uint32_t bytes) {
        store_word<kCount>(indices + (step * kStep + within) * kIndexBytes + group, Word<kCount>(bytes));
    }

    // The indices of four groups, in the low bits.
    NM_DEVICE uint32_t joined(unsigned line, unsigned group) const {
        const uint32_t bytes = load_word<4>(indices + line * kIndexBytes + group);
        if constexpr (kWidth == 8) return bytes;
        if constexpr (kWidth == 4) return joined_nibbles(bytes);
        return (bytes | bytes >> 6 | bytes >> 12 | bytes >> 18) & 0xffu;
    }

    // After a barrier, by all threads.
    NM_DEVICE void write_out(const PanelPlace& to) const {
        write_values(to);
        if constexpr (P::n == 2 && P::m == 4) {
            if (to.layout != kCanonical) return write_metadata(to);
        }
        write_indices(to);
    }

    // Their part alone.
    NM_DEVICE void write_values(const PanelPlace& to) const {
        using S = Share<kPieces>;
        static_assert(S::kAtOnce % kStep == 0);
        const S mine;
        Word<16> words[S::kTurns];
        NM_UNROLL
        for (unsigned turn = 0; turn < S::kTurns; ++turn) {
            const unsigned step = mine.line / kStep + turn * (S::kAtOnce / kStep);
            words[turn] = load_word<16>(values + piece_at(step, mine.line % kStep, mine.item) * 16);
        }
        const unsigned bytes = to.line_groups * kGroupBytes, pieces = to.groups * kGroupBytes / 16;
        char* out = static_cast<char*>(to.values) + uint64_t(to.line + mine.line) * bytes + (to.group * kGroupBytes + mine.item * 16);
        NM_UNROLL
        for (unsigned turn = 0; turn < S::kTurns; ++turn, out += uint64_t(S::kAtOnce) * bytes) {
            if (mine.has(turn, to.lines, pieces)) st_global(out, words[turn]);
        }
    }

  private:
    // Distributes `kEach` items per line over threads, `kAtOnce` lines at a time. Items are always read, so that there is no branch
    // before the store.
    template <unsigned kEach>
    struct Share {
        static constexpr unsigned kAtOnce = kThreads / kEach < kLines ? kThreads / kEach : kLines, kTurns = kLines / kAtOnce;
        static_assert(kLines % kAtOnce == 0 && kThreads % kEach == 0);
        static constexpr bool kSome = kAtOnce * kEach < kThreads;  // some threads are idle

        unsigned line = threadIdx.x / kEach % kAtOnce, item = threadIdx.x % kEach;
        NM_DEVICE bool has(unsigned turn, unsigned lines, unsigned items) const {
            return line + turn * kAtOnce < lines && item < items && (!kSome || threadIdx.x < kAtOnce * kEach);
        }
    };

    NM_DEVICE void write_indices(const PanelPlace& to) const {
        constexpr unsigned kPerWord = 32 / kWidth;
        using S = Share<kGroups / kPerWord>;
        const S mine;
        const unsigned line_words = to.line_groups / kPerWord, left = to.groups / kPerWord;
        uint32_t* out = static_cast<uint32_t*>(to.indices) + uint64_t(to.line + mine.line) * line_words + (to.group / kPerWord + mine.item);
        NM_UNROLL
        for (unsigned turn = 0; turn < S::kTurns; ++turn, out += uint64_t(S::kAtOnce) * line_words) {
            uint32_t packed = 0;
            NM_UNROLL
            for (unsigned j = 0; j < kPerWord / 4; ++j) {
                packed |= joined(mine.line + turn * S::kAtOnce, mine.item * kPerWord + 4 * j) << (4 * j * kWidth);
            }
            if (mine.has(turn, to.lines, left)) st_global(out, packed);
        }
    }

    // The order of reference/layouts.py: tiles of 16 lines and 16 groups, a word for each lane of a warp.
    NM_DEVICE void write_metadata(const PanelPlace& to) const {
        constexpr unsigned kAcross = kGroups / 16, kWords = kLines / 16 * kAcross * 32;
        const unsigned across = to.line_groups / 16;
        uint32_t* const out = static_cast<uint32_t*>(to.indices);
        NM_UNROLL
        for (unsigned first = 0; first < kWords; first += kThreads) {
            const unsigned i = first + threadIdx.x, lane = i % 32, row = i / 32 / kAcross, column = i / 32 % kAcross;
            if ((kWords % kThreads != 0 && i >= kWords) || 16 * row >= to.lines || 16 * column >= to.groups) continue;
            const unsigned line = 16 * row + lane / 4, group = 16 * column + 4 * (lane % 4);
            const unsigned r = to.line / 16 + row, c = to.group / 16 + column;
            const uint64_t tile = to.layout == kMmaSp ? uint64_t(r) * across + c : (uint64_t(r / 4) * across + c) * 4 + r % 4;
            out[tile * 32 + lane] = joined(line, group) | joined(line + 8, group) << 16;
        }
    }
};

}  // namespace nm::cuda
