#include "caches.h"

#include <unistd.h>

#include <algorithm>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace nm {
namespace {

constexpr Caches kUnknown{32 << 10, 512 << 10}, kSmallest{16 << 10, 128 << 10}, kLargest{192 << 10, 4 << 20};

Caches reported() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    return {sysconf(_SC_LEVEL1_DCACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE)};
#elif defined(__APPLE__)
    const auto size_of = [](const char* name) {
        int64_t bytes = 0;
        size_t size = sizeof bytes;
        return sysctlbyname(name, &bytes, &size, nullptr, 0) == 0 ? bytes : 0;
    };
    return {size_of("hw.perflevel0.l1dcachesize"), size_of("hw.perflevel0.l2cachesize")};
#else
    return {0, 0};
#endif
}

int64_t plausible(int64_t bytes, int64_t unknown, int64_t smallest, int64_t largest) {
    return bytes <= 0 ? unknown : std::clamp(bytes, smallest, largest);
}

}  // namespace

const Caches& caches() {
    static const Caches found = [] {
        const Caches said = reported();
        return Caches{plausible(said.first, kUnknown.first, kSmallest.first, kLargest.first),
                      plausible(said.second, kUnknown.second, kSmallest.second, kLargest.second)};
    }();
    return found;
}

}  // namespace nm
