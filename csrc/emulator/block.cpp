#include "block.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

namespace nm::emulator {

namespace {

thread_local Thread* running = nullptr;

// Thrown through a thread that waits when another one has failed, so that its destructors run.
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

void Thread::wait(const char* what) {
    waits = what;
    while (waits) {
        fiber.pause();
        running = this;
        if (block->abandoned()) throw Abandoned();
    }
}

void Block::run(unsigned number, unsigned blocks, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body) {
    index = {number, 0, 0};
    count = {blocks, 1, 1};
    size = {threads, 1, 1};
    body_ = &body;
    shared_.clear();
    dynamic_.reset(dynamic_bytes ? new unsigned char[dynamic_bytes] : nullptr);
    if (dynamic_bytes) std::memset(dynamic_.get(), 0xff, dynamic_bytes);
    warps_.assign((threads + kLanes - 1) / kLanes, {});
    while (threads_.size() < threads) threads_.emplace_back(new Thread);
    alive_ = threads;
    at_barrier_ = 0;
    error_ = nullptr;
    for (unsigned i = 0; i < threads; ++i) {
        Thread& one = *threads_[i];
        one.block = this;
        one.index = {i, 0, 0};
        one.number = int(i);
        one.done = false;
        one.waits = nullptr;
        one.copies.clear();
        one.copy_group = 0;
        one.fiber.prepare(&Block::enter, &one);
    }
    for (unsigned turn = number; alive_ > 0; ++turn) {
        bool moved = false;
        for (unsigned i = 0; i < threads; ++i) {
            // forwards, backwards, and from another place each time
            const unsigned place = (i + 7 * turn) % threads;
            Thread& one = *threads_[turn % 2 ? threads - 1 - place : place];
            if (one.done || (one.waits && !error_)) continue;
            moved = true;
            running = &one;
            one.fiber.resume();
            running = nullptr;
        }
        if (!moved && alive_ > 0) stuck();
    }
    if (error_) std::rethrow_exception(error_);
}

void Block::enter(void* pointer) {
    Thread& thread = *static_cast<Thread*>(pointer);
    Block& block = *thread.block;
    try {
        (*block.body_)();
    } catch (const Abandoned&) {
    } catch (...) {
        if (!block.error_) block.error_ = std::current_exception();
    }
    block.leave(thread);
    thread.fiber.finish();
}

void Block::leave(Thread& thread) {
    thread.done = true;
    --alive_;
    if (at_barrier_ > 0 && at_barrier_ == alive_) release_barrier();
}

void Block::barrier(Thread& thread) {
    if (++at_barrier_ == alive_) return release_barrier();
    thread.wait(kBarrier);
}

void Block::release_barrier() {
    at_barrier_ = 0;
    for (auto& one : threads_) {
        if (one->waits == kBarrier) one->waits = nullptr;
    }
}

const unsigned char (*Block::meet(Thread& thread, uint32_t mask, const char* what, const void* data, size_t bytes))[kDeposit] {
    const int lane = thread.lane();
    const unsigned first = unsigned(thread.number - lane);
    // lanes that the block does not have are not waited for
    const unsigned lanes = size.x - first < unsigned(kLanes) ? size.x - first : unsigned(kLanes);
    const uint32_t wanted = mask & (lanes == unsigned(kLanes) ? ~0u : (1u << lanes) - 1u);
    if (!(mask >> lane & 1)) throw std::logic_error(std::string(what) + ": " + name_of(thread) + " calls it with a mask that leaves it out");
    if (bytes > size_t(kDeposit)) throw std::logic_error(std::string(what) + ": more than a lane can hand over");
    Meeting& meeting = warps_[first / kLanes][mask];
    if (meeting.present == 0) meeting.what = what;
    if (std::strcmp(meeting.what, what) != 0) {
        throw std::logic_error(name_of(thread) + " calls " + what + " while other lanes of the same mask call " + meeting.what);
    }
    auto& deposit = meeting.deposit[meeting.held % 2];
    std::memset(deposit[lane], 0xff, kDeposit);
    std::memcpy(deposit[lane], data, bytes);
    meeting.present |= 1u << lane;
    if (meeting.present != wanted) {
        thread.wait(meeting.what);
    } else {
        meeting.present = 0;
        ++meeting.held;
        for (int i = 0; i < kLanes; ++i) {
            if ((wanted >> i & 1) && i != lane) threads_[first + unsigned(i)]->waits = nullptr;
        }
    }
    return deposit;
}

void* Block::shared(const void* declaration, size_t bytes) {
    auto& memory = shared_[declaration];
    if (!memory) {
        memory.reset(new unsigned char[bytes]);
        std::memset(memory.get(), 0xff, bytes);
    }
    return memory.get();
}

void Block::stuck() {
    std::string who;
    for (const auto& one : threads_) {
        if (!one->done && one->waits && who.size() < 200) who += (who.empty() ? "" : ", ") + name_of(*one) + " in " + one->waits;
    }
    // the fibers that still wait are left: run them to their ends, so that what is on their stacks is destroyed
    error_ = std::make_exception_ptr(std::runtime_error("deadlock: " + who + "; the others have returned or wait elsewhere"));
    for (auto& one : threads_) {
        while (!one->done) {
            running = one.get();
            one->fiber.resume();
            running = nullptr;
        }
    }
    std::rethrow_exception(error_);
}

void run_grid(const char* name, unsigned blocks, unsigned threads, size_t dynamic_bytes, const std::function<void()>& body) {
    const char* asked = std::getenv("NMKERNELS_EMULATOR_THREADS");
    const unsigned workers = asked ? unsigned(std::max(1, std::atoi(asked))) : 1;
    std::atomic<unsigned> next{0};
    std::atomic<bool> failed{false};
    std::vector<std::exception_ptr> errors(workers);
    auto work = [&](unsigned worker) {
        thread_local Block block;
        try {
            for (unsigned i = next++; i < blocks && !failed; i = next++) block.run(i, blocks, threads, dynamic_bytes, body);
        } catch (...) {
            failed = true;
            errors[worker] = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < workers; ++i) others.emplace_back(work, i);
    work(0);
    for (std::thread& one : others) one.join();
    for (const std::exception_ptr& error : errors) {
        if (!error) continue;
        try {
            std::rethrow_exception(error);
        } catch (const std::exception& reason) {
            throw std::runtime_error(std::string(name) + ": " + reason.what());
        }
    }
}

}  // namespace nm::emulator
