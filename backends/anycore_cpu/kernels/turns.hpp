// How a thread gets along with others that want its core: it notices what they take, and lets them have their turn
// between pieces of work rather than in the middle of one, where the rest of the pool would wait for it.
//
// Yielding would not do: Linux 6.18 takes it as giving a whole slice away, and a thread that yields every 10 us beside
// a busy one is left with 1 % of the core. One that sleeps for a moment every millisecond keeps its half.
#pragma once

#include <time.h>

namespace anycore {

inline long nanoseconds(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1'000'000'000L + time.tv_nsec;
}

class Turns {
public:
    // Before a thread takes part in a job. What it did elsewhere, in Python or asleep, says nothing about its core.
    void begin() {
        const long now = nanoseconds(CLOCK_MONOTONIC);
        if (now - seen_ > ELSEWHERE) mark(now);
        seen_ = now;
    }

    // Between two pieces of work: sleeps for a moment if it is somebody else's turn.
    void between() {
        if (++pieces_ % PIECES != 0) return;
        const long now = nanoseconds(CLOCK_MONOTONIC);
        seen_ = now;
        if (now - marked_ < TURN) return;
        if (now - marked_ - (nanoseconds(CLOCK_THREAD_CPUTIME_ID) - worked_) > TAKEN) company_until_ = now + COMPANY;
        if (now < company_until_) {
            const timespec moment = {0, 1000};  // the system makes it some 50 us
            nanosleep(&moment, nullptr);
            rested(now);
        } else {
            mark(now);
        }
    }

    // After a sleep that was to last until now.
    void rested(long asleep_since) {
        const long now = nanoseconds(CLOCK_MONOTONIC);
        if (now < company_until_ && now - asleep_since > TAKEN) company_until_ = now + COMPANY;
        mark(now);
    }

    // It has seen for itself that others want its core.
    void crowded() { company_until_ = nanoseconds(CLOCK_MONOTONIC) + COMPANY; }

    bool in_company() const { return seen_ < company_until_; }

private:
    // Nanoseconds.
    static constexpr long TURN = 1'000'000;       // less than a slice of Linux, which then does not end within a piece
    static constexpr long TAKEN = 400'000;        // more than what the system itself takes of a turn
    static constexpr long COMPANY = 200'000'000;  // how long others are reckoned with after they were last noticed
    static constexpr long ELSEWHERE = 100'000;

    static constexpr int PIECES = 8;  // between looks at the clock, which take 30 ns

    void mark(long now) { seen_ = marked_ = now, worked_ = nanoseconds(CLOCK_THREAD_CPUTIME_ID); }

    unsigned pieces_ = 0;
    long seen_ = 0;                 // last look at the clock
    long marked_ = 0, worked_ = 0;  // when its turn began, and what it had worked until then
    long company_until_ = 0;
};

}  // namespace anycore
