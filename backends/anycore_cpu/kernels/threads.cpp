// The pool. Between kernels its threads look for work for a moment, yielding to whoever else wants the core, then sleep.
#include "threads.hpp"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <new>

#include "interface.hpp"

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

std::atomic<int> wanted{1};  // threads, the caller among them

class Pool {
public:
    // Under `busy`.
    void grow(int threads) {
        for (; threads_ < threads; threads_++) {
            pthread_t thread;
            const auto enter = [](void* pool) -> void* { return static_cast<Pool*>(pool)->serve(), nullptr; };
            if (pthread_create(&thread, nullptr, enter, this) != 0) return;  // fewer do the same work
            pthread_detach(thread);
        }
    }

    void run(long count, void (*work)(void*, long), void* context) {
        // Nobody reads these while nothing is left to take.
        work_ = work;
        context_ = context;
        done_.store(0, std::memory_order_relaxed);
        left_.store(count);  // from here on others take part
        if (asleep_.load() > 0) {
            pthread_mutex_lock(&mutex_);  // whoever saw nothing to do is waiting by now
            pthread_mutex_unlock(&mutex_);
            pthread_cond_broadcast(&wake_);
        }
        while (take()) {
        }
        for (int looks = 0; done_.load(std::memory_order_acquire) < count; looks++)
            looks < PAUSES ? pause() : static_cast<void>(sched_yield());
    }

    std::atomic_flag busy = ATOMIC_FLAG_INIT;

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
        const int index = entered_.fetch_add(1);
        const auto called = [this, index] { return index < wanted.load() && left_.load() > 0; };
        for (int looks = 0;; looks++) {
            if (called() && take()) {
                looks = 0;
            } else if (looks < PAUSES) {
                pause();
            } else if (looks < PAUSES + YIELDS) {
                sched_yield();
            } else {
                pthread_mutex_lock(&mutex_);
                asleep_++;
                while (!called()) pthread_cond_wait(&wake_, &mutex_);
                asleep_--;
                pthread_mutex_unlock(&mutex_);
                looks = 0;
            }
        }
    }

    int threads_ = 1;
    void (*work_)(void*, long) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<long> left_{0};
    alignas(64) std::atomic<long> done_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<int> entered_{1};
    pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;
};

Pool pool;  // its threads end with the process

// A child of a fork has none of its parent's threads.
void start_anew() { new (&pool) Pool; }

pthread_once_t watched = PTHREAD_ONCE_INIT;
void watch_forks() { pthread_atfork(nullptr, nullptr, start_anew); }

}  // namespace

void parallel_for(long count, void (*work)(void*, long), void* context) {
    const int size = wanted.load();
    if (size > 1 && count > 1) {
        pthread_once(&watched, watch_forks);
        if (!pool.busy.test_and_set()) {
            pool.grow(size);
            pool.run(count, work, context);
            pool.busy.clear();
            return;
        }
    }
    for (long i = 0; i < count; i++) work(context, i);
}

}  // namespace anycore

extern "C" void anycore_threads(int count) { anycore::wanted.store(count < 1 ? 1 : count); }
