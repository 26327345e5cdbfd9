#include "fiber.h"

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// On x86-64 a switch saves the registers that a function must preserve, nothing else: a few nanoseconds, where
// swapcontext asks the kernel for the signal mask each time.
#if defined(__x86_64__)
extern "C" void nm_emulator_switch(void** save_here, void* go_there);
asm(R"(
.text
.type nm_emulator_switch, @function
nm_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size nm_emulator_switch, .-nm_emulator_switch
)");
#endif

namespace nm::emulator {

struct Fiber::State {
    std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
    void (*entry)(void*) = nullptr;
    void* argument = nullptr;
#if defined(__x86_64__)
    void* inside = nullptr;
    void* outside = nullptr;
#else
    ucontext_t inside, outside;
#endif
    // what the address sanitizer must know: whose stack is left for whose
    void* fake_inside = nullptr;
    void* fake_outside = nullptr;
    const void* outside_bottom = nullptr;
    size_t outside_bytes = 0;
};

namespace {

[[maybe_unused]] void leaving([[maybe_unused]] void** fake, [[maybe_unused]] const void* bottom, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fake, bottom, bytes);
#endif
}

[[maybe_unused]] void arrived([[maybe_unused]] void* fake, [[maybe_unused]] const void** bottom, [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, bottom, bytes);
#endif
}

// Handed over beside the stack, because the entry of a fiber takes no arguments.
thread_local Fiber::State* starting = nullptr;

void begin() {
    Fiber::State* state = starting;
    arrived(nullptr, &state->outside_bottom, &state->outside_bytes);
    state->entry(state->argument);
    std::abort();  // entry has not called finish()
}

}  // namespace

Fiber::Fiber() : state_(new State) {}
Fiber::~Fiber() = default;

void Fiber::prepare(void (*entry)(void*), void* argument) {
    state_->entry = entry;
    state_->argument = argument;
    state_->fake_inside = nullptr;
#if defined(__x86_64__)
    // what nm_emulator_switch pops: six registers, then the address that ret goes to; a call leaves rsp = 8 mod 16
    auto top = reinterpret_cast<uintptr_t>(state_->stack.get() + kStackBytes) & ~uintptr_t(15);
    auto* frame = reinterpret_cast<void**>(top) - 8;
    for (int i = 0; i < 6; ++i) frame[i] = nullptr;
    frame[6] = reinterpret_cast<void*>(&begin);
    frame[7] = nullptr;
    state_->inside = frame;
#else
    getcontext(&state_->inside);
    state_->inside.uc_stack.ss_sp = state_->stack.get();
    state_->inside.uc_stack.ss_size = kStackBytes;
    state_->inside.uc_link = nullptr;
    makecontext(&state_->inside, &begin, 0);
#endif
}

void Fiber::resume() {
    starting = state_.get();
    leaving(&state_->fake_outside, state_->stack.get(), kStackBytes);
#if defined(__x86_64__)
    nm_emulator_switch(&state_->outside, state_->inside);
#else
    swapcontext(&state_->outside, &state_->inside);
#endif
    arrived(state_->fake_outside, nullptr, nullptr);
}

void Fiber::pause() {
    leaving(&state_->fake_inside, state_->outside_bottom, state_->outside_bytes);
#if defined(__x86_64__)
    nm_emulator_switch(&state_->inside, state_->outside);
#else
    swapcontext(&state_->inside, &state_->outside);
#endif
    arrived(state_->fake_inside, &state_->outside_bottom, &state_->outside_bytes);
}

void Fiber::finish() {
    leaving(nullptr, state_->outside_bottom, state_->outside_bytes);  // null: its fake stack is not needed again
#if defined(__x86_64__)
    nm_emulator_switch(&state_->inside, state_->outside);
#else
    swapcontext(&state_->inside, &state_->outside);
#endif
    std::abort();
}

}  // namespace nm::emulator
