// What changes logits before an id is chosen, as `contract/sampling.py` says: penalties, biases, bans. Few ids of a
// row are touched. A row or an id that there is not is passed over.
#include <algorithm>
#include <cmath>

#include "interface.hpp"
#include "threads.hpp"
#include "vectors.hpp"

namespace anycore {
namespace {

constexpr long TASK = 1L << 14;     // ids of a row, or edits, that are one thread's
constexpr long STRIP = 4 * LANES;   // ids whose counts are looked at together
constexpr int IN_PROMPT = 1 << 30;  // `IN_PROMPT`

struct Penalty {
    float repetition, presence, frequency;

    // Rounded after every operation, as if each were done for the whole row: no product is fused with a difference.
    void apply(float& logit, int32_t count) const {
        const int32_t generated = count & (IN_PROMPT - 1);
        float value = logit > 0 ? logit / repetition : logit * repetition;
        const volatile float often = frequency * static_cast<float>(generated);
        value -= often;
        logit = generated > 0 ? value - presence : value;
    }
};

void penalise(float* logits, const int32_t* counts, long count, const Penalty& penalty) {
    const auto apply = [&](long first, long end) {
        for (long id = first; id < end; id++)
            if (counts[id] > 0) penalty.apply(logits[id], counts[id]);
    };
    long id = 0;
    for (; id + STRIP <= count; id += STRIP) {
        Ints seen{};
        for (long i = 0; i < STRIP; i += LANES) seen |= load_as<Ints>(counts + id + i);
        if (any(seen)) apply(id, id + STRIP);
    }
    apply(id, count);
}

bool within(int64_t index, long count) { return index >= 0 && index < count; }

}  // namespace
}  // namespace anycore

extern "C" {

// Rows `which` [penalised] of logits [rows, count], each by one of `counts` [height, count] in `places` [penalised]: what
// it has seen. A row comes once at most.
void anycore_penalise(float* logits, long rows, long count, const int64_t* which, const int32_t* counts, long height,
                      const int64_t* places, const float* repetition, const float* presence, const float* frequency,
                      long penalised) {
    using namespace anycore;
    const long pieces = (count + TASK - 1) / TASK;
    parallel_for(penalised * pieces, [&](long task) {
        const long i = task / pieces, first = task % pieces * TASK;
        if (!within(which[i], rows) || !within(places[i], height)) return;
        const Penalty penalty{repetition[i], presence[i], frequency[i]};
        penalise(logits + which[i] * count + first, counts + places[i] * count + first, std::min(TASK, count - first),
                 penalty);
    });
}

// Adds values [number] to the ids [number] of rows `which` [number], one after the other.
void anycore_add(float* logits, long rows, long count, const int64_t* which, const int64_t* ids, const float* values,
                 long number) {
    using namespace anycore;
    for (long i = 0; i < number; i++)
        if (within(which[i], rows) && within(ids[i], count)) logits[which[i] * count + ids[i]] += values[i];
}

// Makes them -inf. An id may be banned twice, by two threads.
void anycore_ban(float* logits, long rows, long count, const int64_t* which, const int64_t* ids, long number) {
    using namespace anycore;
    parallel_for((number + TASK - 1) / TASK, [&](long task) {
        float never = -INFINITY;
        for (long i = task * TASK; i < std::min(number, (task + 1) * TASK); i++)
            if (within(which[i], rows) && within(ids[i], count))
                __atomic_store(logits + which[i] * count + ids[i], &never, __ATOMIC_RELAXED);
    });
}

}
