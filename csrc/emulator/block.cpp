#include "block.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

namespace nm::emulator {

namespace {

thread_local Thread* running = nullptr;

// Thrown in waiting threads after another one has failed, so that their destructors run.
struct Abandoned {};

constexpr const char* kBarrier = "__syncthreads";

std::string name_of(const Thread& thread) {
    return "thread " + std::to_string(thread.number) + " of block " + std::to_string(thread.block->index.x);
}

}  // namespace

Thread& current() {
    if (!running) throw std::logic_error("emulator: device code runs outside of a kernel");
    return *running;
}

Memory::Memory(size_t bytes, size_t alignment) : bytes(bytes) {
    // at an odd multiple of the alignment, so that code that relies on more alignment fails
    const auto twice = std::align_val_t(2 * alignment);
    owner.reset(::operator new(alignment + bytes, twice), [=](void* memory) { ::operator delete(memory, twice); });
    data = static_cast<unsigned char*>(owner.get()) + alignment;
    std::memset(data, 0xff, bytes);
}

void Thread::prepare(Block* of, unsigned i, void (*entry)(void*)) {
    block = of;
    index = {i};
    number = int(i);
    done = false;
    waits = nullptr;
    copies.clear();
    copy_group = 0;
    fiber.prepare(entry, this);
}

void Thread::wait(const char* what) {
    waits = what;
    while (waits) {
        fiber.pause();
        if (block->abandoned()) throw Abandoned();
    }
}

void Block::run(unsigned number, unsigned blocks, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body) {
    index = {number, 0, 0}, count = {blocks, 1, 1}, size = {threads, 1, 1};
    body_ = &body;
    shared_.clear();
    shared(nullptr, dynamic_bytes, kDynamicAlignment);
    warps_.clear();
    warps_.resize((threads + kLanes - 1) / kLanes);
    while (threads_.size() < threads) threads_.emplace_back(new Thread);
    alive_ = threads;
    at_barrier_ = 0;
    error_ = nullptr;
    for (unsigned i = 0; i < threads; ++i) threads_[i]->prepare(this, i, &Block::enter);
    // coprime to `threads`, so that some threads run before their neighbours and some after
    unsigned stride = threads / 8 * 5 | 1;
    while (std::gcd(stride, threads) != 1) stride += 2;
    for (unsigned turn = number; alive_ > 0; ++turn) {
        bool moved = false;
        for (unsigned i = 0; i < threads; ++i) {
            // every second turn runs backwards; each pair of turns starts elsewhere
            const unsigned step = (turn % 2 ? threads - 1 - i : i) + 7 * (turn / 2 % threads);
            Thread& one = *threads_[step % threads * stride % threads];
            // after an error waiting threads are unwound too, so that their stacks are destroyed
            if (one.done || (one.waits && !error_)) continue;
            moved = true;
            running = &one;
            one.fiber.resume();
            running = nullptr;
        }
        if (!moved) error_ = deadlock();
    }
    if (error_) std::rethrow_exception(error_);
}

void Block::enter(void* pointer) {
    Thread& thread = *static_cast<Thread*>(pointer);
    Block& block = *thread.block;
    try {
        if (!block.abandoned()) (*block.body_)();
    } catch (const Abandoned&) {
    } catch (...) {
        if (!block.error_) block.error_ = std::current_exception();
    }
    thread.done = true;
    // a barrier that waited only for this thread is now complete
    if (--block.alive_ == block.at_barrier_) block.release_barrier();
    thread.fiber.finish();
}

void Block::barrier(Thread& thread, int line) {
    if (at_barrier_ > 0 && line != barrier_line_) {
        throw std::logic_error(name_of(thread) + " is at the barrier of line " + std::to_string(line) + ", others at that of line " +
                               std::to_string(barrier_line_));
    }
    barrier_line_ = line;
    if (++at_barrier_ == alive_) return release_barrier();
    thread.wait(kBarrier);
}

void Block::release_barrier() {
    at_barrier_ = 0;
    for (auto& one : threads_) {
        if (one->waits == kBarrier) one->waits = nullptr;
    }
}

int Block::lanes(const Thread& thread) const { return std::min(kLanes, int(size.x) - (thread.number - thread.lane())); }

const unsigned char (*Block::meet(Thread& thread, uint32_t mask, const char* what, const void* data, size_t bytes))[kDeposit] {
    const int lane = thread.lane(), first = thread.number - lane;
    // do not wait for lanes that the block does not have
    const uint32_t wanted = mask & ~0u >> (kLanes - lanes(thread));
    if (!(mask >> lane & 1)) throw std::logic_error(std::string(what) + ": " + name_of(thread) + " calls it with a mask that leaves it out");
    if (bytes > size_t(kDeposit)) throw std::logic_error(std::string(what) + ": more than a lane can hand over");
    Meeting& meeting = warps_[size_t(first / kLanes)][mask];
    if (meeting.present == 0) meeting.what = what;
    if (std::strcmp(meeting.what, what) != 0) {
        throw std::logic_error(name_of(thread) + " calls " + what + " while other lanes of the same mask call " + meeting.what);
    }
    auto& deposit = meeting.deposit[meeting.held % 2];
    std::memcpy(deposit[lane], data, bytes);
    meeting.present |= 1u << lane;
    if (meeting.present != wanted) {
        thread.wait(meeting.what);
    } else {
        meeting.present = 0;
        ++meeting.held;
        for (int i = 0; i < kLanes; ++i) {
            if ((wanted >> i & 1) && i != lane) threads_[size_t(first + i)]->waits = nullptr;
        }
    }
    return deposit;
}

void* Block::shared(const void* declaration, size_t bytes, size_t alignment) {
    const auto at = shared_.try_emplace(declaration, bytes, alignment).first;
    size_t all = 0;
    for (const auto& each : shared_) all += each.second.bytes;
    if (all > kMostShared) throw std::runtime_error(std::to_string(all) + " bytes of shared memory are more than a block has");
    return at->second.data;
}

bool Block::has_shared(const void* address, size_t bytes) const {
    return std::any_of(shared_.begin(), shared_.end(), [&](const auto& each) {
        const auto at = uintptr_t(address), first = uintptr_t(each.second.data);
        return at >= first && at + bytes <= first + each.second.bytes;
    });
}

void Block::check_shared(const char* what, const void* address, size_t bytes) const {
    if (!has_shared(address, bytes)) throw std::runtime_error(std::string(what) + ": not an address in shared memory");
    if (uintptr_t(address) % bytes) throw std::runtime_error(std::string(what) + ": misaligned address");
}

std::exception_ptr Block::deadlock() const {
    std::map<std::string, std::pair<int, int>> places;  // the first thread and the number of threads
    for (const auto& one : threads_) {
        if (!one->done) ++places.try_emplace(one->waits, one->number, 0).first->second.second;
    }
    std::string text = "deadlock in block " + std::to_string(index.x);
    for (const auto& [what, who] : places) {
        text += ", " + std::to_string(who.second) + " threads in " + what + " (the first is " + std::to_string(who.first) + ")";
    }
    return std::make_exception_ptr(std::runtime_error(text + ", the others have returned"));
}

void run_grid(const char* name, unsigned blocks, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body) {
    const char* asked = std::getenv("NMKERNELS_EMULATOR_THREADS");
    const int workers = asked ? std::atoi(asked) : 1;
    std::atomic<unsigned> next{0};
    std::exception_ptr error;
    std::mutex mutex;
    auto work = [&] {
        thread_local Block block;
        try {
            if (threads == 0 || threads > kMostThreads) throw std::runtime_error("a block cannot have " + std::to_string(threads) + " threads");
            for (unsigned i = next++; i < blocks; i = next++) if (i < ends || blocks - i <= ends) block.run(i, blocks, threads, dynamic_bytes, body);
        } catch (...) {
            const std::lock_guard<std::mutex> hold(mutex);
            error = std::current_exception();
            next = blocks;
        }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < workers; ++i) others.emplace_back(work);
    work();
    for (std::thread& one : others) one.join();
    try {
        if (error) std::rethrow_exception(error);
    } catch (const std::exception& reason) {
        throw std::runtime_error(std::string(name) + ": " + reason.what());
    }
}

}  // namespace nm::emulator
