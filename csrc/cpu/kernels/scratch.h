// Memory that a thread keeps for its next product: fresh pages cost more than filling them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace nm {
namespace {

constexpr int64_t kPackedBytes = 16 << 20;  // of an operand that is packed, or as many of its tokens as fit

class Scratch {
  public:
    template <class T>
    T* at_least(int64_t count) {
        const size_t bytes = size_t(count) * sizeof(T);
        if (bytes > bytes_) {
            memory_.reset(::operator new(bytes, std::align_val_t{64}));
            bytes_ = bytes;
        }
        return static_cast<T*>(memory_.get());
    }

  private:
    struct Delete {
        void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
    };
    std::unique_ptr<void, Delete> memory_;
    size_t bytes_ = 0;
};

}  // namespace
}  // namespace nm
