// One block of CUDA threads on one CPU thread: a fiber per CUDA thread, run in turn until all have returned.
//
// A thread goes on until it waits: at a barrier of the block, or for the other lanes that a warp function names. Threads
// are taken up in an order that changes from block to block and from turn to turn, so that code without a barrier that it
// needs gives other results here too. Shared memory is filled with NaN before each block. What cannot go on (a barrier
// that some threads never reach, a lane that a mask names and that has returned) is an error that says who waits where.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "fiber.h"

namespace nm::emulator {

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

constexpr int kLanes = 32;
constexpr int kDeposit = 128;  // bytes that a lane can hand over

// What the lanes of one mask hand each other. Two sets of deposits: a lane may be at the next meeting while others
// still read from this one, but not further.
struct Meeting {
    const char* what = nullptr;
    uint32_t present = 0;
    uint64_t held = 0;  // how many meetings there have been
    alignas(16) unsigned char deposit[2][kLanes][kDeposit];
};

// A cp.async that has not been waited for.
struct Copy {
    void* to;
    const void* from;
    int bytes, filled, group;
};

struct Thread {
    Fiber fiber;
    class Block* block = nullptr;
    Index index;
    int number = 0;
    bool done = true;
    const char* waits = nullptr;  // for what, or null
    std::vector<Copy> copies;
    int copy_group = 0;  // the one that is not committed

    int lane() const { return number % kLanes; }
    void wait(const char* what);
};

class Block {
  public:
    // Calls body() as every thread of block `number` of `count`. Throws what a thread throws.
    void run(unsigned number, unsigned count, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body);

    void barrier(Thread& thread);

    // Leaves `bytes` of data for the lanes of `mask` and waits for theirs: deposit[lane].
    const unsigned char (*meet(Thread& thread, uint32_t mask, const char* what, const void* data, size_t bytes))[kDeposit];

    // Shared memory of one declaration, the same for all threads.
    void* shared(const void* declaration, size_t bytes);
    unsigned char* dynamic_shared() { return dynamic_.get(); }

    // Whether a thread has failed, so that the others must not wait any longer.
    bool abandoned() const { return error_ != nullptr; }

    Index index, count, size;

  private:
    static void enter(void* thread);
    void leave(Thread& thread);
    void release_barrier();
    [[noreturn]] void stuck();

    std::vector<std::unique_ptr<Thread>> threads_;
    std::vector<std::map<uint32_t, Meeting>> warps_;
    std::map<const void*, std::unique_ptr<unsigned char[]>> shared_;
    std::unique_ptr<unsigned char[]> dynamic_;
    const std::function<void()>* body_ = nullptr;
    std::exception_ptr error_;
    unsigned alive_ = 0, at_barrier_ = 0;
};

// The CUDA thread that runs now on this CPU thread.
Thread& current();

// Every block of a grid, on as many CPU threads as NMKERNELS_EMULATOR_THREADS says (1).
void run_grid(const char* name, unsigned blocks, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body);

}  // namespace nm::emulator
