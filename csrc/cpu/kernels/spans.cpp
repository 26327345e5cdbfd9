// The bits of a span: 64 elements at a time where the groups fit into a word, else group by group.
#include "spans.h"

#include <cstring>

#include "patterns.h"
#include "select.h"
#include "../../core/dispatch.h"

namespace nm {
namespace {

template <class T, class Keep>
void select_words(const T* w, int64_t count, const Keep& keep, uint64_t* bits) {
    const int64_t words = count / 64, rest = count % 64;
    for (int64_t i = 0; i < words; ++i) {
        prefetch64(w + 64 * i);
        bits[i] = keep(w + 64 * i);
    }
    if (rest == 0) return;
    T padded[64] = {};
    std::memcpy(static_cast<void*>(padded), w + 64 * words, size_t(rest) * sizeof(T));
    bits[words] = keep(padded) & ((uint64_t(1) << rest) - 1);
}

template <class T, int N, int M>
void select_fixed(const T* w, int64_t count, int, int, uint64_t* bits) {
    select_words(w, count, [](const T* from) { return keep64<T, N, M>(from).bits(); }, bits);
}

template <class T, int M>
void select_some(const T* w, int64_t count, int n, int, uint64_t* bits) {
    select_words(w, count, [n](const T* from) { return keep_some<M>(from, n); }, bits);
}

template <class T>
void select_groups(const T* w, int64_t count, int n, int m, uint64_t* bits) {
    uint32_t keys[kMaxM];
    uint8_t keep[kMaxM];
    std::memset(bits, 0, size_t((count + 63) / 64) * sizeof *bits);
    for (int64_t at = 0; at < count; at += m) {
        for (int i = 0; i < m; ++i) keys[i] = Key<T>::of(w[at + i]);
        mask_group(keys, n, m, Key<T>::bits, keep);
        for (int i = 0; i < m; ++i) bits[(at + i) / 64] |= uint64_t(keep[i]) << ((at + i) % 64);
    }
}

}  // namespace

namespace NM_ISA {

template <class T>
SelectFn<T>* select_fn(int n, int m) {
    check_pattern(n, m);
    return for_pattern<SelectFn<T>>(
        n, m, [](auto N, auto M) -> SelectFn<T>* { return select_fixed<T, N, M>; },
        [](auto M) -> SelectFn<T>* { return select_some<T, M>; }, select_groups<T>);
}

template SelectFn<float>* select_fn<float>(int, int);
template SelectFn<bf16>* select_fn<bf16>(int, int);
template SelectFn<fp16>* select_fn<fp16>(int, int);

}  // namespace NM_ISA
}  // namespace nm
