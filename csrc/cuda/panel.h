// A packed operand of a tile, in shared memory between the threads that pack it and those that write it out: lines of a
// power of two of values, and a byte for each group's indices. A line leaves in pieces of 16 bytes of values and 4 of
// indices, or of a whole tile of metadata.
#pragma once

#include "pack.h"

namespace nm::cuda {

// Where a panel goes in an operand.
struct Place {
    void* values;
    void* indices;
    int line, group;    // the first of the tile
    int lines, groups;  // left from there on: fewer than a panel's at the operand's end
    int line_groups;    // of a whole line of the operand
    int layout;
};

// `kStep`: lines that neighbouring threads write are so far apart; kThreads of a block write out.
template <class Out, class P, int kLines, int kGroups, int kStep, int kThreads>
struct Panel {
    static constexpr int kWidth = P::n * (P::m <= 4 ? 2 : 4);                          // bits of a group's indices
    static constexpr int kPieces = kGroups * P::n * int(sizeof(Out)) / 16;             // of 16 bytes, in a line
    static constexpr int kIndexBytes = kGroups + 4;                                    // of a line: other banks for the next one
    static_assert((kPieces & (kPieces - 1)) == 0);

    alignas(16) unsigned char values[kLines * kPieces * 16];
    alignas(16) unsigned char indices[kLines * kIndexBytes];

    // Threads beside each other write different lines at once, and others the next groups: pieces are exchanged within a line,
    // by a number that is not the same for neighbours, so that these are in different banks.
    static NM_DEVICE unsigned piece_at(unsigned step, unsigned within, unsigned piece) {
        return (within * (kLines / kStep) + step) * kPieces + (piece ^ (step & (kPieces - 1)));
    }

    // Values of the groups from `group` on, so many bytes of them, in line step * kStep + within.
    template <int kBytes>
    NM_DEVICE void put(unsigned step, unsigned within, unsigned group, const uint32_t* words) {
        const unsigned at = group * P::n * unsigned(sizeof(Out));
        Word<kBytes> word;
        memcpy(&word, words, kBytes);
        store_word<kBytes>(values + piece_at(step, within, at / 16) * 16 + at % 16, word);
    }

    template <int kCount>
    NM_DEVICE void put_indices(unsigned step, unsigned within, unsigned group, uint32_t bytes) {
        store_word<kCount>(indices + (step * kStep + within) * kIndexBytes + group, Word<kCount>(bytes));
    }

    // The indices of four groups, in the low bits.
    NM_DEVICE uint32_t joined(int line, int group) const {
        const uint32_t bytes = load_word<4>(indices + line * kIndexBytes + group);
        if constexpr (kWidth == 8) return bytes;
        if constexpr (kWidth == 4) return joined_nibbles(bytes);
        return (bytes | bytes >> 6 | bytes >> 12 | bytes >> 18) & 0xffu;
    }

    // After a barrier, by all threads.
    NM_DEVICE void write_out(const Place& to) const {
        const int pieces = (to.groups < kGroups ? to.groups : kGroups) * P::n * int(sizeof(Out)) / 16;
        const int64_t line_bytes = int64_t(to.line_groups) * P::n * int(sizeof(Out));
        char* const out = static_cast<char*>(to.values) + to.line * line_bytes + int64_t(to.group) * P::n * int(sizeof(Out));
        each<kLines * kPieces>([&](int i) {
            const int line = i / kPieces, piece = i % kPieces;
            if (line < to.lines && piece < pieces) {
                const unsigned at = piece_at(unsigned(line) / kStep, unsigned(line) % kStep, unsigned(piece));
                st_global(out + line * line_bytes + piece * 16, load_word<16>(values + at * 16));
            }
        });
        if constexpr (P::n == 2 && P::m == 4) {
            if (to.layout != kCanonical) return write_metadata(to);
        }
        constexpr int kPerWord = 32 / kWidth, kWords = kGroups / kPerWord;
        const int words = to.groups / kPerWord;
        const int line_words = to.line_groups / kPerWord;
        uint32_t* const index = static_cast<uint32_t*>(to.indices) + int64_t(to.line) * line_words + to.group / kPerWord;
        each<kLines * kWords>([&](int i) {
            const int line = i / kWords, word = i % kWords;
            if (line >= to.lines || word >= words) return;
            uint32_t packed = 0;
            NM_UNROLL
            for (int j = 0; j < kPerWord / 4; ++j) packed |= joined(line, word * kPerWord + 4 * j) << (4 * j * kWidth);
            index[int64_t(line) * line_words + word] = packed;
        });
    }

  private:
    // f(i) for i < kCount, shared out to the threads.
    template <int kCount, class F>
    static NM_DEVICE void each(const F& f) {
        NM_UNROLL
        for (int turn = 0; turn < (kCount + kThreads - 1) / kThreads; ++turn) {
            const int i = turn * kThreads + int(threadIdx.x);
            if (kCount % kThreads == 0 || i < kCount) f(i);
        }
    }

    // The order of reference/layouts.py: tiles of 16 lines and 16 groups, a word for each lane of a warp.
    NM_DEVICE void write_metadata(const Place& to) const {
        constexpr int kAcross = kGroups / 16;
        const int64_t across = to.line_groups / 16;
        uint32_t* const out = static_cast<uint32_t*>(to.indices);
        each<kLines / 16 * kAcross * 32>([&](int i) {
            const int lane = i % 32, row = i / 32 / kAcross, column = i / 32 % kAcross;
            if (16 * row >= to.lines || 16 * column >= to.groups) return;
            const int line = 16 * row + lane / 4, group = 16 * column + 4 * (lane % 4);
            const int64_t r = to.line / 16 + row, c = to.group / 16 + column;
            const int64_t tile = to.layout == kMmaSp ? r * across + c : (r / 4 * across + c) * 4 + r % 4;
            out[tile * 32 + lane] = joined(line, group) | joined(line + 8, group) << 16;
        });
    }
};

}  // namespace nm::cuda
