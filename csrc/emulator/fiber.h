// Fibers: functions with stacks of their own that hand the processor to each other. One fiber is one CUDA thread.
#pragma once

#include <cstddef>
#include <memory>

namespace nm::emulator {

class Fiber {
  public:
    static constexpr size_t kStackBytes = 128 << 10;

    Fiber();
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // The next resume() calls entry(argument) from its beginning. entry must call finish() last and not throw.
    void prepare(void (*entry)(void*), void* argument);

    // From outside: runs the fiber until it pauses or finishes. From inside: back to who resumed it.
    void resume();
    void pause();
    [[noreturn]] void finish();

    struct State;

  private:
    std::unique_ptr<State> state_;
};

}  // namespace nm::emulator
