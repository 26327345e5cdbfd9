// Tensors of more than 2^31 elements: the same two megabytes of memory are mapped again and again, so that only addresses are
// large. Before and after lies unmapped memory: an index cut to 32 bits ends the process. The last page is of its own.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

namespace nm_test {

constexpr int64_t kTile = 1 << 21;  // bytes mapped again and again
constexpr int64_t kElements = (int64_t(1) << 31) + (1 << 21);

class Huge {
  public:
    explicit Huge(int64_t bytes) : tiles_((bytes + kTile - 1) / kTile) {
        // room on both sides stays without access
        base_ = static_cast<char*>(mmap(nullptr, size_t((tiles_ + 4) * kTile), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (base_ == MAP_FAILED) return;
        const int file = memfd_create("nmkernels", 0);
        ok_ = file >= 0 && ftruncate(file, 2 * kTile) == 0;
        for (int64_t i = 0; ok_ && i < tiles_; ++i) {
            const int64_t part = i + 1 == tiles_ ? kTile : 0;
            ok_ = mmap(data() + i * kTile, size_t(kTile), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, part) != MAP_FAILED;
        }
        if (file >= 0) close(file);
    }
    Huge(const Huge&) = delete;
    Huge& operator=(const Huge&) = delete;
    ~Huge() {
        if (base_ != MAP_FAILED) munmap(base_, size_t((tiles_ + 4) * kTile));
    }

    bool ok() const { return ok_; }
    char* data() const { return base_ + 2 * kTile; }
    char* last() const { return data() + (tiles_ - 1) * kTile; }

  private:
    int64_t tiles_;
    char* base_;
    bool ok_ = false;
};

inline void fill(char* page, uint64_t seed) {
    const Buffer some = numbers(kTile / 2, nm::kBFloat16, seed, false);
    std::memcpy(page, some.data(), size_t(kTile));
}

}  // namespace nm_test
