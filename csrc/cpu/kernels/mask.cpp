// mask and prune: one pass over contiguous groups.
#include "../kernels.h"
#include "../stream.h"
#include "patterns.h"
#include "select.h"
#include "spans.h"

namespace nm {
namespace {

// What becomes of 64 elements: bools, or the pruned elements themselves.
template <class T>
void apply(const T*, const Kept64<T>& kept, uint8_t* out) {
    kept.flags(out);
}

template <class T>
void apply(const T* w, const Kept64<T>& kept, T* out) {
    kept.pick(w, out);
}

// `count` elements, whole groups.
template <class T, class Out>
using ApplyFn = void(const T* w, int64_t count, int n, int m, Out* out);

template <class T, class Out, class Keep>
void apply_words(const T* w, int64_t count, const Keep& keep, Out* out) {
    const int64_t whole = count / 64 * 64, rest = count - whole;
    for (int64_t at = 0; at < whole; at += 64) {
        prefetch64(w + at);
        apply(w + at, keep(w + at), out + at);
    }
    if (rest == 0) return;
    T padded[64] = {};
    Out result[64];
    std::memcpy(static_cast<void*>(padded), w + whole, size_t(rest) * sizeof(T));
    apply(padded, keep(padded), result);
    std::memcpy(static_cast<void*>(out + whole), result, size_t(rest) * sizeof(Out));
}

template <class T, class Out, int N, int M>
void apply_fixed(const T* w, int64_t count, int, int, Out* out) {
    apply_words(w, count, [](const T* from) { return keep64<T, N, M>(from); }, out);
}

template <class T, class Out, int M>
void apply_some(const T* w, int64_t count, int n, int, Out* out) {
    apply_words(w, count, [n](const T* from) { return Kept64<T>::of(keep_some<M>(from, n)); }, out);
}

// By the bits of a span: groups that words cut through.
template <class T, class Out>
void apply_groups(const T* w, int64_t count, int n, int m, Out* out) {
    uint64_t bits[kMaxSpan / 64];
    NM_ISA::select_fn<T>(n, m)(w, count, n, m, bits);
    const uint64_t* next = bits;
    apply_words(w, count, [&](const T*) { return Kept64<T>::of(*next++); }, out);
}

template <class T, class Out>
ApplyFn<T, Out>* apply_fn(int n, int m) {
    check_pattern(n, m);
    return for_pattern<ApplyFn<T, Out>>(
        n, m, [](auto N, auto M) -> ApplyFn<T, Out>* { return apply_fixed<T, Out, N, M>; },
        [](auto M) -> ApplyFn<T, Out>* { return apply_some<T, Out, M>; }, apply_groups<T, Out>);
}

template <class T, class Out>
void select_and_apply(const T* w, int64_t numel, int n, int m, Out* out, int threads) {
    ApplyFn<T, Out>* const apply_span = apply_fn<T, Out>(n, m);
    const int64_t span = span_of(m);
    const bool streamed = numel * int64_t(sizeof(Out)) >= kStreamBytes;
    parallel_ranges((numel + span - 1) / span, span, threads, [=](int64_t first, int64_t last) {
        alignas(64) Out buffer[kMaxSpan];
        each_span(first, last, span, numel, [&](int64_t at, int64_t count) {
            apply_span(w + at, count, n, m, streamed ? buffer : out + at);
            if (streamed) stream(out + at, buffer, count * int64_t(sizeof(Out)));
        });
        if (streamed) stream_fence();
    });
}

}  // namespace

namespace NM_ISA {

void mask(const void* w, int dtype, int64_t numel, int n, int m, uint8_t* out, int threads) {
    by_dtype(dtype, [&](auto element) { select_and_apply(static_cast<const decltype(element)*>(w), numel, n, m, out, threads); });
}

void prune(const void* w, int dtype, int64_t numel, int n, int m, void* out, int threads) {
    by_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        select_and_apply(static_cast<const T*>(w), numel, n, m, static_cast<T*>(out), threads);
    });
}

}  // namespace NM_ISA
}  // namespace nm
