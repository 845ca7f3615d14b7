// Attention, with a paged cache or without: rows of a request over its tokens, keys in tiles, softmax as it goes.
//
// A request's single row (decoding) takes its keys as they lie, all query heads of a group at once, and long contexts
// are cut into parts of a fixed length, so that several threads share one. Several rows (prompts, encoders) first turn
// keys and values into panels and are multiplied as linear layers are. How a request is cut depends on nothing but
// itself.
#include "attention.hpp"

#include <algorithm>
#include <cmath>

#include "attention_panels.hpp"
#include "interface.hpp"
#include "panels.hpp"
#include "places.hpp"
#include "replay.hpp"
#include "scratch.hpp"
#include "threads.hpp"

namespace anycore {
namespace {

constexpr long PART = 512;  // keys of a single row that one task takes
constexpr long ROWS = 128;  // rows of a task, heads of a group counted apart
constexpr float NEVER = -INFINITY;

long first_key(const Attention& a, long position) {
    return a.window ? std::max(0L, position - static_cast<long>(a.window) + 1) : 0;
}

long last_key(const Attention& a, long position, long length) {
    if (a.causal) return position + 1;
    return a.window ? std::min<long>(length, position + a.window) : length;
}

// ---- softmax over a tile ---------------------------------------------------------------------------------------------

struct Softmax {
    float top = NEVER, total = 0;
};

INLINE Floats weight_of(Floats score, float) { return exp(score); }
INLINE Floats weight_of(Floats score, bf16) { return exp_roughly(score); }

// Scores [from, to) of a tile become weights, all others 0; returns what earlier sums are multiplied by. T: of the model.
template <class T, class Weight>
float weigh(const Attention& a, float* scores, long from, long to, long padded, Softmax& state, Weight* weights) {
    const auto inside = [&](long j) {
        Ints lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        lane += static_cast<int>(j);
        return (lane >= static_cast<int>(from)) & (lane < static_cast<int>(to));
    };
    const long begin = from / LANES * LANES;
    Floats top = all(state.top);
    for (long j = begin; j < to; j += LANES) {
        Floats score = load(scores + j) * a.scale;
        if (a.softcap != 0) {
            score = tanh(score / a.softcap) * a.softcap;
            store(scores + j, score);
        }
        if (j < from || j + LANES > to) score = inside(j) ? score : all(NEVER);
        top = larger(score, top);
    }
    const float found = largest(top);
    if (found == NEVER) {
        for (long j = 0; j < padded; j++) weights[j] = Weight{};
        return 1;
    }
    for (long j = 0; j < begin; j++) weights[j] = Weight{};
    const float scale = a.softcap != 0 ? 1 : a.scale;
    Floats total{};
    long j = begin;
    for (; j < to; j += LANES) {
        Floats weight = weight_of(load(scores + j) * scale - found, T{});
        if (j < from || j + LANES > to) weight = inside(j) ? weight : Floats{};
        total += weight;
        store(weights + j, weight);
    }
    for (; j < padded; j++) weights[j] = Weight{};
    const float factor = state.top == NEVER ? 0 : std::exp(state.top - found);
    state.total = state.total * factor + sum(total);
    state.top = found;
    return factor;
}

void scale_row(float* row, long size, float factor) {
    if (factor != 1)
        for (long d = 0; d < size; d++) row[d] *= factor;
}

template <class T>
void write_row(const float* row, long size, float total, T* out) {
    const float factor = 1 / total;
    long d = 0;
    for (; d + LANES <= size; d += LANES) store(out + d, load(row + d) * factor);
    for (; d < size; d++) store_one(out + d, row[d] * factor);
}

// ---- one row: keys as they lie ---------------------------------------------------------------------------------------

// A key or value is on its way to the second cache while others are multiplied, since the first one has fewer places for
// what is on its way: the processor sees no further than a block.
template <class T>
INLINE void ask(const T* head, long dim) {
    for (long d = 0; d < dim; d += 64 / static_cast<long>(sizeof(T))) __builtin_prefetch(head + d, 0, 2);
}

// scores[HEADS][TILE] = q[HEADS][dim] times count keys; what lies between count and the next multiple of LANES is filled.
// Their values are asked for.
template <int HEADS, class T>
void score(const float* q, const Places<T>& places, long count, long dim, float* scores) {
    constexpr int TOGETHER = 4;  // keys
    constexpr long AHEAD = 16;   // keys
    const T* const* keys = places.keys;
    const long whole = dim / LANES * LANES;
    for (long first = 0; first < count; first += LANES) {
        Floats products[HEADS][LANES];
        for (int j = 0; j < LANES; j += TOGETHER) {
            const T* key[TOGETHER];
            for (int i = 0; i < TOGETHER; i++) {
                const long at = std::min(first + j + i, count - 1);
                key[i] = keys[at];
                ask(places.values[at], dim);
                ask(keys[std::min(at + AHEAD, count - 1)], dim);
            }
            Floats totals[HEADS][TOGETHER] = {};
            for (long d = 0; d < whole; d += LANES) {
                Floats wide[TOGETHER];
                for (int i = 0; i < TOGETHER; i++) wide[i] = load(key[i] + d);
                for (int h = 0; h < HEADS; h++) {
                    const Floats query = load(q + h * dim + d);
                    for (int i = 0; i < TOGETHER; i++) totals[h][i] += query * wide[i];
                }
            }
            for (int h = 0; h < HEADS; h++)
                for (int i = 0; i < TOGETHER; i++) products[h][j + i] = totals[h][i];
        }
        for (int h = 0; h < HEADS; h++) store(scores + h * TILE + first, sums(products[h]));
    }
    for (long d = whole; d < dim; d++)
        for (long j = 0; j < count; j++)
            for (int h = 0; h < HEADS; h++) scores[h * TILE + j] += q[h * dim + d] * widen(keys[j][d]);
}

// out[HEADS][dim] += weights[HEADS][TILE] times count values.
template <int HEADS, class T>
void mix(const float* weights, const T* const* values, long count, long dim, float* out) {
    constexpr int TOGETHER = 4;  // vectors
    long d = 0;
    const auto some = [&](auto vectors) {
        constexpr int VECTORS = decltype(vectors)::value;
        Floats totals[HEADS][VECTORS];
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < VECTORS; i++) totals[h][i] = load(out + h * dim + d + i * LANES);
        for (long j = 0; j < count; j++) {
            Floats wide[VECTORS];
            for (int i = 0; i < VECTORS; i++) wide[i] = load(values[j] + d + i * LANES);
            for (int h = 0; h < HEADS; h++)
                for (int i = 0; i < VECTORS; i++) totals[h][i] += weights[h * TILE + j] * wide[i];
        }
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < VECTORS; i++) store(out + h * dim + d + i * LANES, totals[h][i]);
        d += VECTORS * LANES;
    };
    while (d + TOGETHER * LANES <= dim) some(std::integral_constant<int, TOGETHER>());
    while (d + LANES <= dim) some(std::integral_constant<int, 1>());
    for (; d < dim; d++)
        for (long j = 0; j < count; j++)
            for (int h = 0; h < HEADS; h++) out[h * dim + d] += weights[h * TILE + j] * widen(values[j][d]);
}

constexpr int HEADS_AT_ONCE = 4;  // more would take the compiler longer than they save

// Calls work<heads>() for 1 <= heads <= HEADS_AT_ONCE.
template <class Work, int... HEADS>
void with_heads(long heads, const Work& work, std::integer_sequence<int, HEADS...>) {
    static_cast<void>(
        ((heads == HEADS + 1 && (work(std::integral_constant<int, HEADS + 1>()), true)) || ...));
}

template <class Work>
void with_heads(long heads, const Work& work) {
    with_heads(heads, work, std::make_integer_sequence<int, HEADS_AT_ONCE>());
}

// `parts` holds, for each head of the group, the top score, the sum of weights and dim sums.
template <class T>
void attend_one(const Attention& a, const Task& task, float* parts) {
    const long dim = a.head_dim, group = a.heads / a.kv_heads;
    static thread_local Scratch scratch;
    scratch.reserve(sizeof(float) * static_cast<size_t>(group * (2 * dim + TILE)) + sizeof(Places<T>) +
                        sizeof(Softmax) * static_cast<size_t>(group) +
                        sizeof(T) * static_cast<size_t>(Places<T>::room(a)), 6);
    float* q = scratch.take<float>(group * dim);
    float* out = scratch.take<float>(group * dim);
    float* scores = scratch.take<float>(group * TILE);
    auto& places = *scratch.take<Places<T>>(1);
    auto* states = scratch.take<Softmax>(group);
    T* opened = scratch.take<T>(Places<T>::room(a));
    const T* from = static_cast<const T*>(a.q) + task.first_row * a.q_stride + task.head * group * dim;
    for (long i = 0; i < group * dim; i++) q[i] = widen(from[i]), out[i] = 0;
    std::fill_n(states, group, Softmax{});
    for (long first = task.first_key; first < task.last_key; first += TILE) {
        const long count = std::min(TILE, task.last_key - first);
        places.find(a, task, first, count, opened);
        for (long h = 0; h < group; h += HEADS_AT_ONCE)
            with_heads(std::min<long>(HEADS_AT_ONCE, group - h), [&](auto heads) {
                score<decltype(heads)::value>(q + h * dim, places, count, dim, scores + h * TILE);
            });
        for (long h = 0; h < group; h++) {
            float* row = scores + h * TILE;
            scale_row(out + h * dim, dim, weigh<T>(a, row, 0, count, count, states[h], row));
        }
        for (long h = 0; h < group; h += HEADS_AT_ONCE)
            with_heads(std::min<long>(HEADS_AT_ONCE, group - h), [&](auto heads) {
                mix<decltype(heads)::value>(scores + h * TILE, places.values, count, dim, out + h * dim);
            });
    }
    for (long h = 0; h < group; h++) {
        if (task.part < 0) {
            const long head = task.first_row * a.heads + task.head * group + h;
            write_row(out + h * dim, dim, states[h].total, static_cast<T*>(a.out) + head * dim);
        } else {
            float* part = parts + (task.part * group + h) * (dim + 2);
            part[0] = states[h].top, part[1] = states[h].total;
            std::copy_n(out + h * dim, dim, part + 2);
        }
    }
}

// Joins the parts of one row and KV head: tasks [first, last).
template <class T>
void join(const Attention& a, const Task* first, const Task* last, float* parts) {
    const long dim = a.head_dim, group = a.heads / a.kv_heads;
    for (long h = 0; h < group; h++) {
        const auto part = [&](const Task* task) { return parts + (task->part * group + h) * (dim + 2); };
        float top = NEVER, total = 0;
        for (const Task* task = first; task < last; task++) top = std::max(top, part(task)[0]);
        float* sums = part(first) + 2;
        for (const Task* task = first; task < last; task++) {
            const float factor = std::exp(part(task)[0] - top);
            total += part(task)[1] * factor;
            for (long d = 0; d < dim; d++)
                sums[d] = task == first ? sums[d] * factor : sums[d] + part(task)[2 + d] * factor;
        }
        const long head = first->first_row * a.heads + first->head * group + h;
        write_row(sums, dim, total, static_cast<T*>(a.out) + head * dim);
    }
}

// ---- several rows: keys and values in panels -------------------------------------------------------------------------

// Rows that pass from scores to sums while these stay in the first cache; AMX would have to shape its tiles each time.
constexpr long SOME = IN_TILES<Factor<bf16>> ? ROWS : 24;

// One head of the queries of a task, side by side.
template <class T>
void copy_queries(const Attention& a, const Task& task, long group, long inputs, Factor<T>* to) {
    const long dim = a.head_dim;
    const T* q = static_cast<const T*>(a.q) + task.first_row * a.q_stride + task.head * group * dim;
    for (long r = 0; r < task.rows * group; r++, to += inputs) {
        const T* from = q + r / group * a.q_stride + r % group * dim;
        if constexpr (sizeof(T) == sizeof(Factor<T>)) {
            std::copy_n(from, dim, to);
        } else {
            long d = 0;
            for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d));
            for (; d < dim; d++) to[d] = widen(from[d]);
        }
        std::fill_n(to + dim, inputs - dim, Factor<T>{});
    }
}

template <class T>
void attend_several(const Attention& a, const Task& task) {
    using F = Factor<T>;
    constexpr bool IN_PLACE = sizeof(F) == sizeof(float);  // weights take the place of scores
    const long dim = a.head_dim, group = a.heads / a.kv_heads, rows = task.rows * group;
    const long inputs = padded_inputs<F>(dim), width = (dim + COLUMNS - 1) / COLUMNS * COLUMNS;
    const long length = a.lengths[task.request];
    const long position = task.first_row - a.starts[task.request + 1] + length;  // of the first row
    static thread_local Scratch scratch;
    scratch.reserve(sizeof(float) * static_cast<size_t>(rows * width + SOME * TILE) +
                        sizeof(F) * static_cast<size_t>(rows * inputs + SOME * TILE + TILE * (inputs + width)) +
                        sizeof(Places<T>) + sizeof(Softmax) * static_cast<size_t>(rows) +
                        sizeof(T) * static_cast<size_t>(Places<T>::room(a)), 9);
    float* out = scratch.take<float>(rows * width);
    float* scores = scratch.take<float>(SOME * TILE);
    F* q = scratch.take<F>(rows * inputs);
    F* weights = scratch.take<F>(IN_PLACE ? 0 : SOME * TILE);
    F* key_panels = scratch.take<F>(TILE * inputs);
    F* value_panels = scratch.take<F>(TILE * width);
    auto& places = *scratch.take<Places<T>>(1);
    auto* states = scratch.take<Softmax>(rows);
    T* opened = scratch.take<T>(Places<T>::room(a));
    if constexpr (IN_PLACE) weights = scores;
    std::fill_n(states, rows, Softmax{});
    copy_queries<T>(a, task, group, inputs, q);
    for (long first = task.first_key; first < task.last_key; first += TILE) {
        const bool begun = first > task.first_key;  // something is in `out` already
        const long count = std::min(TILE, task.last_key - first);
        const long padded = padded_inputs<F>(count);
        places.find(a, task, first, count, opened);
        for (long c = 0; c < count; c += COLUMNS)
            pack_keys(places.keys + c, std::min<long>(COLUMNS, count - c), dim, inputs, key_panels + c * inputs);
        for (long c = 0; c < dim; c += COLUMNS)
            pack_values(places.values, count, padded, c, std::min<long>(COLUMNS, dim - c), value_panels + c * TILE);
        for (long row = 0; row < rows; row += SOME) {
            const long some = std::min(SOME, rows - row);
            for (long c = 0; c < count; c += COLUMNS)
                multiply(some, q + row * inputs, inputs, key_panels + c * inputs, inputs, scores + c, TILE, false);
            for (long r = 0; r < some; r++) {
                const long at = position + (row + r) / group;
                const long from = std::max(0L, first_key(a, at) - first);
                const long to = std::min(count, last_key(a, at, length) - first);
                const float factor = weigh<T>(a, scores + r * TILE, std::min(from, count), std::max(to, 0L), padded,
                                              states[row + r], weights + r * TILE);
                if (begun) scale_row(out + (row + r) * width, width, factor);
            }
            for (long c = 0; c < dim; c += COLUMNS)
                multiply(some, weights, TILE, value_panels + c * TILE, padded, out + row * width + c, width, begun);
        }
    }
    for (long r = 0; r < rows; r++) {
        const long head = (task.first_row + r / group) * a.heads + task.head * group + r % group;
        write_row(out + r * width, dim, states[r].total, static_cast<T*>(a.out) + head * dim);
    }
}

// ---- all requests ----------------------------------------------------------------------------------------------------

// Appends the tasks of one request and KV head; returns how many parts there are by now.
long cut(const Attention& a, long request, long head, long parts, List<Task>& tasks) {
    const long start = a.starts[request], end = a.starts[request + 1], length = a.lengths[request];
    const long context = length - (end - start);
    if (end - start == 1) {
        const long first = first_key(a, context), last = last_key(a, context, length);
        const bool whole = last - first <= PART;
        for (long key = first; key < last; key += PART)
            tasks.push_back(Task{request, head, start, 1, key, std::min(last, key + PART), whole ? -1 : parts++});
        return parts;
    }
    const long step = std::max(1L, ROWS / static_cast<long>(a.heads / a.kv_heads));
    for (long row = end - start; row > 0; row -= step) {  // the last rows see most: they begin
        const long first = std::max(0L, row - step);
        tasks.push_back(Task{request, head, start + first, row - first, first_key(a, context + first),
                         last_key(a, context + row - 1, length), -1});
    }
    return parts;
}

template <class T>
void attend(const Attention& a) {
    prepare_heads<T>(a);
    static thread_local List<Task> tasks;
    static thread_local Scratch scratch;
    tasks.clear();
    long parts = 0;
    for (long request = a.requests - 1; request >= 0; request--)  // the pool begins at the end
        for (long head = 0; head < a.kv_heads; head++) parts = cut(a, request, head, parts, tasks);
    const long group = a.heads / a.kv_heads;
    const long numbers = parts * group * (static_cast<long>(a.head_dim) + 2);
    scratch.reserve(static_cast<size_t>(numbers) * sizeof(float), 1);
    float* all_sums = scratch.take<float>(numbers);
    const Task* all_tasks = tasks.begin();  // thread-local names mean other things on other threads
    const long count = tasks.size();
    parallel_for(count, [&, all_tasks, all_sums](long i) {
        const Task& task = all_tasks[i];
        if (a.starts[task.request + 1] - a.starts[task.request] == 1)
            attend_one<T>(a, task, all_sums);
        else
            attend_several<T>(a, task);
    });
    for (long i = 0, end; i < count; i = end) {
        const Task& task = all_tasks[i];
        for (end = i + 1; end < count && task.part >= 0 && all_tasks[end].part >= 0 &&
                          all_tasks[end].request == task.request && all_tasks[end].head == task.head;)
            end++;
        if (task.part >= 0) join<T>(a, all_tasks + i, all_tasks + end, all_sums);
    }
}

}  // namespace
}  // namespace anycore

extern "C" void anycore_attention(const anycore::Attention* what) {
    if (what->wide)
        anycore::attend<float>(*what);
    else
        anycore::attend<anycore::bf16>(*what);
}

RECORDED(anycore_attention)
