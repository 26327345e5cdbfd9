// A 64-bit fingerprint of memory, at the speed of reading it: any change of the bytes changes it, but for one chance in
// 2^64 or so. It is the same for any number of threads and every instruction set. Not for cryptography.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../kernels.h"
#include "simd/simd.h"
#include "spans.h"

namespace nm {
namespace {

constexpr int64_t kSums = 8, kStripe = kSums * 8, kStripes = 1024, kChunkBytes = kStripes * kStripe;
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio

// The finalizer of splitmix64 (Steele, Lea and Flood 2014): every bit of the input reaches every bit of the output.
inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Each sum adds the product of the halves of (word xor key), the key another one for every place, so that words that change
// places are seen; and the word itself, since a half that is 0 would hide the other. Compilers see no 32-bit product in it.
inline void add(uint64_t* sums, const char* words, uint64_t place, const uint64_t* keys) {
    for (int i = 0; i < kSums; i += kLongs) {
        const Longs word = load_as<Longs>(words + 8 * i), x = word ^ (load_as<Longs>(keys + i) + place);
        store_as(sums + i, load_as<Longs>(sums + i) + low_product(x, x >> 32) + word);
    }
}

uint64_t of_chunk(const char* data, int64_t bytes, const uint64_t* keys) {
    alignas(64) uint64_t sums[kSums] = {};
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
    alignas(64) uint64_t keys[kSums];
    for (int64_t i = 0; i < kSums; ++i) keys[i] = mixed(uint64_t(i + 1));
    const int64_t chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
    std::vector<uint64_t> parts(size_t(chunks), 0);
    parallel_for(chunks, threads, [&](int64_t chunk) {
        const int64_t begin = chunk * kChunkBytes;
        parts[size_t(chunk)] = of_chunk(static_cast<const char*>(data) + begin, std::min(kChunkBytes, bytes - begin), keys);
    });
    uint64_t all = uint64_t(bytes);
    for (uint64_t part : parts) all = mixed(all ^ part) + kOdd;
    return all;
}

}  // namespace NM_ISA
}  // namespace nm
