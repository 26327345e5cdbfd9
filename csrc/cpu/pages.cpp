#include "pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nm {

void want_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = uintptr_t(2) << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) & ~(page - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(bytes)) & ~(page - 1);
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace nm
