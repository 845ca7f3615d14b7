// The pool. A thread that waits looks for a moment, then sleeps: its core is then idle, and the system brings over to
// it whoever of the pool was set aside on another one.
#include "threads.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <new>

#include "interface.hpp"
#include "turns.hpp"

namespace anycore {
namespace {

constexpr long LOOKS = 100'000;        // nanoseconds that it looks for work, or for the end of it, before it sleeps
constexpr long LOOKS_BESIDE = 30'000;  // the same where others want its core
constexpr int PAUSES = 16;            // between looks at the clock
// Some sleeps end by themselves: a core that goes idle brings over only what has not run for half a millisecond, so it
// has to go idle more than once.
constexpr long SLEEP = 300'000;
constexpr int SLEEPS = 16;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until it is woken, `word` is no longer `seen`, or `limit` nanoseconds have passed; 0: however long.
void sleep(std::atomic<int>& word, int seen, long limit) {
    const timespec time = {0, limit};
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, limit ? &time : nullptr, nullptr, 0);
}

void wake(std::atomic<int>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

std::atomic<int> wanted{1};  // threads, the caller among them
thread_local Turns turns;

// Looks until `found`; false after a while.
template <class Found>
bool look(const Found& found) {
    const long since = nanoseconds(CLOCK_MONOTONIC), most = turns.in_company() ? LOOKS_BESIDE : LOOKS;
    do {
        for (int i = 0; i < PAUSES; i++) {
            if (found()) return true;
            pause();
        }
    } while (nanoseconds(CLOCK_MONOTONIC) - since < most);
    return false;
}

// Keeps a worker off the caller's core while others want its own. A sleeper that the caller wakes is otherwise put behind
// the caller as often as not, and the two then share one core beside a neighbour that has the other for itself.
class Place {
public:
    void avoid(int core) {
        if (core == avoided_) return;
        if (avoided_ < 0) known_ = sched_getaffinity(0, sizeof usual_, &usual_) == 0;
        cpu_set_t cores = usual_;
        if (core >= 0) CPU_CLR(core, &cores);
        if (known_ && CPU_COUNT(&cores) > 0) sched_setaffinity(0, sizeof cores, &cores);
        avoided_ = core;
    }

private:
    bool known_ = false;
    int avoided_ = -1;
    cpu_set_t usual_;
};

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
        count_ = count;
        caller_core_.store(sched_getcpu(), std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        left_.store(count);  // from here on others take part
        if (asleep_.load() > 0) {
            posted_++;  // whoever saw nothing to do and does not sleep yet will not
            wake(posted_);
        }
        work_off();
        const auto finished = [=] { return done_.load() == count; };
        while (!look(finished)) {
            waited_for_.store(1);
            if (finished()) break;
            const long now = nanoseconds(CLOCK_MONOTONIC);
            sleep(waited_for_, 1, SLEEP);
            turns.rested(now);
        }
    }

    std::atomic_flag busy = ATOMIC_FLAG_INIT;

private:
    void work_off() {
        turns.begin();
        while (take()) turns.between();
    }

    // Does the work of one index; false if none is left. Whoever lowers `left_` holds the job open until `done_` is up.
    bool take() {
        long left = left_.load();
        do {
            if (left == 0) return false;
        } while (!left_.compare_exchange_weak(left, left - 1));
        const long count = count_;
        work_(context_, left - 1);
        if (done_.fetch_add(1) + 1 == count && waited_for_.load() != 0) {
            waited_for_.store(0);
            wake(waited_for_);
        }
        return true;
    }

    void serve() {
        const int index = entered_.fetch_add(1);
        const auto called = [this, index] { return index < wanted.load() && left_.load() > 0; };
        Place place;
        for (int sleeps = 0;; sleeps++) {
            place.avoid(turns.in_company() ? caller_core_.load(std::memory_order_relaxed) : -1);
            if (index < wanted.load() && look(called)) {
                if (sched_getcpu() == caller_core_.load(std::memory_order_relaxed)) turns.crowded();
                work_off();
                sleeps = 0;
                continue;
            }
            asleep_++;
            const int posted = posted_.load();
            if (!called()) sleep(posted_, posted, sleeps < SLEEPS ? SLEEP : 0);
            asleep_--;
            turns.rested(nanoseconds(CLOCK_MONOTONIC));
        }
    }

    int threads_ = 1;
    void (*work_)(void*, long) = nullptr;
    void* context_ = nullptr;
    long count_ = 0;
    alignas(64) std::atomic<long> left_{0};
    alignas(64) std::atomic<long> done_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<int> posted_{0};      // jobs that sleepers were woken for
    std::atomic<int> waited_for_{0};  // whether the caller sleeps until all is done
    std::atomic<int> caller_core_{-1};
    std::atomic<int> entered_{1};
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
    for (long i = count; i-- > 0;) work(context, i);  // as the pool takes them
}

long thread_count() { return wanted.load(); }

}  // namespace anycore

extern "C" void anycore_threads(int count) { anycore::wanted.store(count < 1 ? 1 : count); }
