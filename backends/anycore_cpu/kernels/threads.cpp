// The pool. Between kernels its threads look for work for a moment, yielding to whoever else wants the core, then sleep.
#include "threads.hpp"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace anycore {
namespace {

constexpr int PAUSES = 500;  // looks before the first yield: some 10 microseconds
constexpr int YIELDS = 300;  // yields before sleep: some 100 microseconds if nobody else wants the core

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) std::thread([this] { serve(); }).detach();
    }

    void run(long count, void (*work)(void*, long), void* context) {
        // Nobody reads these while nothing is left to take.
        work_ = work;
        context_ = context;
        done_.store(0, std::memory_order_relaxed);
        left_.store(count);  // from here on others take part
        if (asleep_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        while (take()) {
        }
        for (int looks = 0; done_.load(std::memory_order_acquire) < count; looks++)
            looks < PAUSES ? pause() : static_cast<void>(sched_yield());
    }

    std::mutex busy;

private:
    // Does the work of one index; false if none is left. Whoever lowers `left_` holds the job open until `done_` is up.
    bool take() {
        long left = left_.load();
        do {
            if (left == 0) return false;
        } while (!left_.compare_exchange_weak(left, left - 1));
        work_(context_, left - 1);
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void serve() {
        for (int looks = 0;; looks++) {
            if (take()) {
                looks = 0;
            } else if (looks < PAUSES) {
                pause();
            } else if (looks < PAUSES + YIELDS) {
                sched_yield();
            } else {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_++;
                wake_.wait(lock, [this] { return left_.load() > 0; });
                asleep_--;
                looks = 0;
            }
        }
    }

    void (*work_)(void*, long) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<long> left_{0};
    alignas(64) std::atomic<long> done_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

std::atomic<int> wanted{1};
Pool* pool = nullptr;  // never destroyed: its threads end with the process
int pool_size = 0;
std::mutex making;

// The threads of the parent do not exist in a child.
void forget() {
    pool = nullptr;
    new (&making) std::mutex;
}

Pool* current(int size) {
    std::lock_guard<std::mutex> lock(making);
    if (pool == nullptr || pool_size < size) {
        static const int registered = pthread_atfork(nullptr, nullptr, forget);
        static_cast<void>(registered);
        pool = new Pool(size);
        pool_size = size;
    }
    return pool;
}

}  // namespace

void parallel_for(long count, void (*work)(void*, long), void* context) {
    const int size = wanted.load();
    if (size > 1 && count > 1) {
        Pool* threads = current(size);
        if (threads->busy.try_lock()) {
            threads->run(count, work, context);
            threads->busy.unlock();
            return;
        }
    }
    for (long i = 0; i < count; i++) work(context, i);
}

}  // namespace anycore

extern "C" void anycore_threads(int count) { anycore::wanted.store(count < 1 ? 1 : count); }
