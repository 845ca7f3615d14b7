// A whole step in one call: the kernels that Python has recorded, one after the other.
#include "replay.hpp"

#include "scratch.hpp"
#include "threads.hpp"

namespace anycore {
namespace {

struct Call {  // as `recording.py` writes it
    void (*run)(const Word* words);
    const Word* words;
};

// ---- several texts ---------------------------------------------------------------------------------------------------

struct Step {  // as `texts.py` writes it, and what follows
    void (*run)(const Word* words);
    int64_t at;  // where its words begin in the script, in bytes
};

// What is added to a word of the script: where this group's own memory, script, rows and numbers are.
enum Kind { PLACE, SCRIPT, IDS, POSITIONS, TYPES, WANTED, STARTS, LENGTHS, ROWS, REQUESTS, KINDS };

struct Patch {
    int64_t at;  // bytes
    int64_t kind;
};

struct Texts {
    const char* script;  // the words of all steps, and the structs that some of them point to
    const Step* steps;
    const Patch* patches;
    int64_t script_bytes, step_count, patch_count;
    int64_t room;              // bytes of memory that the steps work in
    int64_t place, row_bytes;  // where in there the result is, and what a row of it takes
    const int64_t *ids, *positions, *types;  // [rows]; types may be null
    const int64_t* wanted;                   // [requests]: one row of each; null: all rows are
    const int32_t* starts;                   // [requests + 1]: first rows
    const int64_t* groups;                   // [group_count + 1]: first requests
    int64_t group_count;
    char* out;  // the wanted rows
};

void run_group(const Texts& t, long group) {
    const int64_t first = t.groups[group], requests = t.groups[group + 1] - first;
    const int64_t row = t.starts[first], rows = t.starts[first + requests] - row;
    static thread_local Scratch scratch;
    scratch.reserve(static_cast<size_t>(t.script_bytes + t.room + requests * 16 + 4), 5);
    char* script = scratch.take<char>(t.script_bytes);
    int32_t* starts = scratch.take<int32_t>(requests + 1);
    int32_t* lengths = scratch.take<int32_t>(requests);
    int64_t* wanted = scratch.take<int64_t>(requests);
    char* room = scratch.take<char>(t.room);
    for (int64_t i = 0; i <= requests; i++) starts[i] = t.starts[first + i] - static_cast<int32_t>(row);
    for (int64_t i = 0; i < requests; i++) lengths[i] = starts[i + 1] - starts[i];
    for (int64_t i = 0; t.wanted && i < requests; i++) wanted[i] = t.wanted[first + i] - row;
    const auto number = [](const void* place) { return reinterpret_cast<int64_t>(place); };
    int64_t added[KINDS];
    added[PLACE] = number(room), added[SCRIPT] = number(script);
    added[IDS] = number(t.ids + row), added[POSITIONS] = number(t.positions + row);
    added[TYPES] = t.types ? number(t.types + row) : 0, added[WANTED] = number(wanted);
    added[STARTS] = number(starts), added[LENGTHS] = number(lengths);
    added[ROWS] = rows, added[REQUESTS] = requests;
    std::memcpy(script, t.script, static_cast<size_t>(t.script_bytes));
    for (const Patch* patch = t.patches; patch < t.patches + t.patch_count; patch++) {
        int64_t word;
        std::memcpy(&word, script + patch->at, sizeof word);
        word += added[patch->kind];
        std::memcpy(script + patch->at, &word, sizeof word);
    }
    for (const Step* step = t.steps; step < t.steps + t.step_count; step++)
        step->run(reinterpret_cast<const Word*>(script + step->at));
    std::memcpy(t.out + (t.wanted ? first : row) * t.row_bytes, room + t.place,
                static_cast<size_t>((t.wanted ? requests : rows) * t.row_bytes));
}

}  // namespace
}  // namespace anycore

extern "C" {

void anycore_replay(const anycore::Call* calls, long count) {
    for (const anycore::Call* call = calls; call < calls + count; call++) call->run(call->words);
}

// Groups of whole texts, each on one thread from beginning to end: what lies between the kernels stays in its cache.
void anycore_replay_texts(const anycore::Texts* texts) {
    anycore::parallel_for(texts->group_count, [=](long group) { anycore::run_group(*texts, group); });
}

}
