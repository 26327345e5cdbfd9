// Fibers: functions with their own stacks that switch cooperatively. One fiber is one CUDA thread.
#pragma once

#include <cstddef>

#if defined(__x86_64__) && defined(__ELF__)
#define NM_OWN_SWITCH
#else
#include <ucontext.h>
#endif

namespace nm::emulator {

class Fiber {
  public:
    // Inaccessible guard memory below the stack: an overflow crashes.
    static constexpr size_t kStackBytes = 128 << 10, kGuardBytes = 64 << 10;

    Fiber();
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // The next resume() calls entry(argument) from its beginning. entry must call finish() last and not throw.
    void prepare(void (*entry)(void*), void* argument);

    // From outside: runs the fiber until it pauses or finishes. From inside: returns to its resumer.
    void resume();
    void pause();
    [[noreturn]] void finish();

  private:
#if defined(NM_OWN_SWITCH)
    using Context = void*;  // the stack pointer; the rest is on the stack
#else
    using Context = ucontext_t;
#endif
    static void begin();

    unsigned char* memory_;
    Context inside_{}, outside_{};
    void (*entry_)(void*) = nullptr;
    void* argument_ = nullptr;
    // the address sanitizer's data for the suspended stack, and that stack's bounds
    void* fake_inside_ = nullptr;
    void* fake_outside_ = nullptr;
    const void* outside_bottom_ = nullptr;
    size_t outside_bytes_ = 0;
};

}  // namespace nm::emulator
