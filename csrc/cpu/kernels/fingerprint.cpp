// A 64-bit fingerprint of memory, at the speed of reading it: any change of the bytes changes it, but for one chance in
// 2^64 or so. It is the same for any number of threads and every instruction set. Not for cryptography.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../kernels.h"
#include "spans.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace nm {
namespace {

constexpr int64_t kLanes = 8, kStripe = kLanes * 8, kStripes = 1024, kBytes = kStripes * kStripe;
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio

// The finalizer of splitmix64 (Steele, Lea and Flood 2014): every bit of the input reaches every bit of the output.
inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Each lane adds the product of the halves of (word xor key), the key another one for every place, so that words that change
// places are seen; and the word itself, since a half that is 0 would hide the other. Compilers see no 32-bit product in it.
#if defined(__AVX512F__)
inline void add(uint64_t* sums, const char* words, uint64_t place, const uint64_t* keys) {
    const __m512i word = _mm512_loadu_si512(words), key = _mm512_add_epi64(_mm512_loadu_si512(keys), _mm512_set1_epi64(int64_t(place)));
    const __m512i x = _mm512_xor_si512(word, key), product = _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32));
    _mm512_storeu_si512(sums, _mm512_add_epi64(_mm512_loadu_si512(sums), _mm512_add_epi64(product, word)));
}
#elif defined(__AVX2__)
inline void add(uint64_t* sums, const char* words, uint64_t place, const uint64_t* keys) {
    for (int half = 0; half < 2; ++half) {
        const auto at = [half](auto* from) { return reinterpret_cast<const __m256i*>(from) + half; };
        const __m256i word = _mm256_loadu_si256(at(words)), key = _mm256_add_epi64(_mm256_loadu_si256(at(keys)), _mm256_set1_epi64x(int64_t(place)));
        const __m256i x = _mm256_xor_si256(word, key), product = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
        const __m256i sum = _mm256_add_epi64(_mm256_loadu_si256(at(sums)), _mm256_add_epi64(product, word));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums) + half, sum);
    }
}
#else
inline void add(uint64_t* sums, const char* words, uint64_t place, const uint64_t* keys) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        uint64_t word;
        std::memcpy(&word, words + 8 * lane, sizeof word);
        const uint64_t x = word ^ (keys[lane] + place);
        sums[lane] += (x & 0xffffffffu) * (x >> 32) + word;
    }
}
#endif

uint64_t of_chunk(const char* data, int64_t bytes, const uint64_t* keys) {
    alignas(64) uint64_t sums[kLanes] = {};
    const int64_t whole = bytes / kStripe;
    for (int64_t i = 0; i < whole; ++i) {
        __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(data) + uintptr_t(i * kStripe + kAhead)));
        add(sums, data + i * kStripe, uint64_t(i) * kOdd, keys);
    }
    if (const int64_t rest = bytes % kStripe) {
        char words[kStripe] = {};
        std::memcpy(words, data + whole * kStripe, size_t(rest));
        add(sums, words, uint64_t(whole) * kOdd, keys);
    }
    uint64_t all = uint64_t(bytes);
    for (uint64_t sum : sums) all = mixed(all ^ sum) + kOdd;
    return all;
}

}  // namespace

namespace NM_ISA {

uint64_t fingerprint(const void* data, int64_t bytes, int threads) {
    alignas(64) uint64_t keys[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) keys[lane] = mixed(uint64_t(lane + 1));
    const int64_t chunks = (bytes + kBytes - 1) / kBytes;
    std::vector<uint64_t> parts(size_t(chunks), 0);
    parallel_for(chunks, threads, [&](int64_t chunk) {
        const int64_t begin = chunk * kBytes;
        parts[size_t(chunk)] = of_chunk(static_cast<const char*>(data) + begin, std::min(kBytes, bytes - begin), keys);
    });
    uint64_t all = uint64_t(bytes);
    for (uint64_t part : parts) all = mixed(all ^ part) + kOdd;
    return all;
}

}  // namespace NM_ISA
}  // namespace nm
