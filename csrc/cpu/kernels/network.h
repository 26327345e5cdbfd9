// The R-th largest lane of each group by a merging network. Two falling lists a and b are merged without comparing
// indices: the r-th largest of both is
//
//   c_r = max over i + j = r of min(a_i, b_j),   a_0 = b_0 = infinity
//       = min over i + j = r + 1 of max(a_i, b_j),   i, j >= 1, nothing below the end of a list
//
// so every step of the network is a minimum or a maximum of whole registers. Lists start as single lanes; each exchange
// with a neighbouring block doubles what they cover, and only the R largest are ever needed. Where b is a, exchanged, the
// terms (i, j) and (j, i) are too: half of them and one more exchange give the others.
#pragma once

#include "simd/simd.h"

#if defined(__AVX2__)

namespace nm {
namespace {

// Each lane takes the lane Size away in the pair of blocks of Size lanes.
template <class L, int Size>
NM_INLINE Register across(Register v) {
    return exchange<Size * int(sizeof(typename L::Lane))>(v);
}

template <class L, int Rank, class V, int Have>
V nth_of_two(const V (&a)[Have], const V (&b)[Have]) {
    static_assert(Rank >= 1 && Rank <= 2 * Have, "the two lists hold it");
    V found;
    bool first = true;
#pragma GCC unroll 8
    for (int i = Rank > Have ? Rank - Have : 0; i <= Have && i <= Rank; ++i) {
        const int j = Rank - i;
        const V one = i == 0 ? b[j - 1] : j == 0 ? a[i - 1] : L::min(a[i - 1], b[j - 1]);
        found = first ? one : L::max(found, one);
        first = false;
    }
    return found;
}

template <class L, class V, int Have, int... Before>
void merge_lists(const V (&a)[Have], const V (&b)[Have], V* merged, std::integer_sequence<int, Before...>) {
    if constexpr (Have == 2 && sizeof...(Before) > 2) {  // the second and the third are the same two in order
        const V x = L::min(a[0], b[0]), y = L::max(a[1], b[1]);
        merged[0] = L::max(a[0], b[0]);
        merged[1] = L::max(x, y);
        merged[2] = L::min(x, y);
        if constexpr (sizeof...(Before) > 3) merged[3] = L::min(a[1], b[1]);
    } else {
        ((merged[Before] = nth_of_two<L, Before + 1>(a, b)), ...);
    }
}

// nth_of_two where b is a of the neighbouring block of Size lanes.
template <class L, int Rank, int Size, class V, int Have>
V nth_of_neighbours(const V (&a)[Have]) {
    static_assert(Rank >= 1 && Rank <= 2 * Have, "the two lists hold it");
    V found;
    bool first = true;
    if constexpr (Rank <= Have) {
#pragma GCC unroll 8
        for (int i = 1; 2 * i <= Rank + 1; ++i) {
            const V one = L::max(a[i - 1], across<L, Size>(a[Rank - i]));
            found = first ? one : L::min(found, one);
            first = false;
        }
        if (Rank == 1) return found;
        return L::min(found, across<L, Size>(found));
    } else {
#pragma GCC unroll 8
        for (int i = Rank - Have; 2 * i <= Rank; ++i) {
            const V one = L::min(a[i - 1], across<L, Size>(a[Rank - i - 1]));
            found = first ? one : L::max(found, one);
            first = false;
        }
        if (Rank == 2 * Have) return found;
        return L::max(found, across<L, Size>(found));
    }
}

// Every lane holds the largest of its block of Size lanes, in falling order.
template <class L, int M, int Rank, int Size, class V, int Have>
V nth_of_blocks(const V (&a)[Have]) {
    if constexpr (2 * Size == M && Rank != 2) return nth_of_neighbours<L, Rank, Size>(a);
    V b[Have];
    for (int i = 0; i < Have; ++i) b[i] = across<L, Size>(a[i]);
    if constexpr (2 * Size == M) {
        return nth_of_two<L, Rank>(a, b);  // for the second, two exchanges side by side beat two in turn
    } else {
        constexpr int next = 2 * Have < Rank ? 2 * Have : Rank;
        V merged[next];
        merge_lists<L>(a, b, merged, std::make_integer_sequence<int, next>());
        return nth_of_blocks<L, M, Rank, 2 * Size>(merged);
    }
}

// In all lanes of the group.
template <class L, int M, int Rank, class V>
V nth_of_group(V keys) {
    const V single[1] = {keys};
    return nth_of_blocks<L, M, Rank, 1>(single);
}

// The same for four registers at once, group by group in their lanes. Transposed, four lanes of a group are four
// registers: they are sorted without an exchange, and no lane repeats the work of its neighbours.
// Of the result, lane i of every four belongs to register i.
template <class L, int M, int Rank, class V>
V nth_of_quad(const V* keys) {
    V column[4];
    L::transpose(keys, column);
    const V a[2] = {L::max(column[0], column[1]), L::min(column[0], column[1])};
    const V b[2] = {L::max(column[2], column[3]), L::min(column[2], column[3])};
    if constexpr (M == 4) {
        return nth_of_two<L, Rank>(a, b);
    } else {
        constexpr int have = Rank < 4 ? Rank : 4;
        V merged[have];
        merge_lists<L>(a, b, merged, std::make_integer_sequence<int, have>());
        return nth_of_blocks<L, M, Rank, 4>(merged);
    }
}

}  // namespace
}  // namespace nm

#endif
