#include "fiber.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

// The address sanitizer needs the next stack before a switch, and the previous one after it.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
#define __sanitizer_start_switch_fiber(...)
#define __sanitizer_finish_switch_fiber(...)
#endif

// On x86-64 a switch saves only the callee-saved registers: a few nanoseconds, while swapcontext makes a system call for
// the signal mask.
#if defined(NM_OWN_SWITCH)
extern "C" void nm_emulator_switch(void** save_here, void*& there);
asm(R"(
.text
.type nm_emulator_switch, @function
nm_emulator_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
.size nm_emulator_switch, .-nm_emulator_switch
)");
#else
static void nm_emulator_switch(ucontext_t* save_here, ucontext_t& there) { swapcontext(save_here, &there); }
#endif

namespace nm::emulator {

namespace {

// Passed in a variable, because a fiber's first function takes no arguments.
thread_local Fiber* starting = nullptr;

}  // namespace

Fiber::Fiber() {
    void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) throw std::bad_alloc();
    memory_ = static_cast<unsigned char*>(memory);
}

Fiber::~Fiber() { munmap(memory_, kGuardBytes + kStackBytes); }

void Fiber::begin() {
    Fiber* self = starting;
    __sanitizer_finish_switch_fiber(nullptr, &self->outside_bottom_, &self->outside_bytes_);
    self->entry_(self->argument_);
    std::abort();  // entry has not called finish()
}

void Fiber::prepare(void (*entry)(void*), void* argument) {
    entry_ = entry;
    argument_ = argument;
    fake_inside_ = nullptr;
#if defined(NM_OWN_SWITCH)
    // what nm_emulator_switch pops: six registers, then the return address; a call leaves rsp = 8 mod 16
    void** frame = reinterpret_cast<void**>(memory_ + kGuardBytes + kStackBytes) - 8;
    for (int i = 0; i < 8; ++i) frame[i] = i == 6 ? reinterpret_cast<void*>(&begin) : nullptr;
    inside_ = frame;
#else
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = memory_ + kGuardBytes;
    inside_.uc_stack.ss_size = kStackBytes;
    inside_.uc_link = nullptr;
    makecontext(&inside_, &begin, 0);
#endif
}

void Fiber::resume() {
    starting = this;
    __sanitizer_start_switch_fiber(&fake_outside_, memory_ + kGuardBytes, kStackBytes);
    nm_emulator_switch(&outside_, inside_);
    __sanitizer_finish_switch_fiber(fake_outside_, nullptr, nullptr);
}

void Fiber::pause() {
    __sanitizer_start_switch_fiber(&fake_inside_, outside_bottom_, outside_bytes_);
    nm_emulator_switch(&inside_, outside_);
    __sanitizer_finish_switch_fiber(fake_inside_, &outside_bottom_, &outside_bytes_);
}

void Fiber::finish() {
    __sanitizer_start_switch_fiber(nullptr, outside_bottom_, outside_bytes_);  // null: this stack is finished
    nm_emulator_switch(&inside_, outside_);
    std::abort();
}

}  // namespace nm::emulator
