// Storing past the caches. An ordinary store first reads the line it writes to; where the output is larger than the
// caches anyway, a streaming store of whole lines saves that third of the traffic.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace nm {

constexpr int64_t kStreamBytes = int64_t(16) << 20;  // outputs from here on are streamed

namespace {

constexpr int64_t kLineBytes = 64;

// Both on whole lines; `to` on a line boundary.
inline void stream_lines(char* to, const char* from, int64_t bytes) {
#if defined(__AVX512F__)
    for (int64_t i = 0; i < bytes; i += 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX2__)
    for (int64_t i = 0; i < bytes; i += 32) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    }
#elif defined(__SSE2__)
    for (int64_t i = 0; i < bytes; i += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
#else
    std::memcpy(to, from, size_t(bytes));
#endif
}

// Copies from a buffer in the cache to any address; the parts of lines at both ends are stored as usual.
inline void stream(void* target, const void* source, int64_t bytes) {
    char* to = static_cast<char*>(target);
    const char* from = static_cast<const char*>(source);
    int64_t head = -reinterpret_cast<intptr_t>(to) & (kLineBytes - 1);
    head = head < bytes ? head : bytes;
    const int64_t lines = (bytes - head) & -kLineBytes;
    if (head) std::memcpy(to, from, size_t(head));
    stream_lines(to + head, from + head, lines);
    if (bytes > head + lines) std::memcpy(to + head + lines, from + head + lines, size_t(bytes - head - lines));
}

// Copies from a buffer in the cache, past the caches or not.
inline void put(void* to, const void* from, int64_t bytes, bool streamed) {
    if (streamed) {
        stream(to, from, bytes);
    } else {
        std::memcpy(to, from, size_t(bytes));
    }
}

// Streaming stores are not ordered with others: to be called at the end of each range, before another thread may read it.
inline void stream_fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace
}  // namespace nm
