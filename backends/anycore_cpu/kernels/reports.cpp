// Log-probabilities by rows of logits: of ids that are named, and of the most likely ones. A row is read from memory once.
#include <algorithm>
#include <cmath>

#include "interface.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "vectors.hpp"

namespace anycore {
namespace {

constexpr long BLOCK = 4096;       // ids whose exponents are summed by themselves, from the first cache
constexpr long STRIP = 4 * LANES;  // ids that are looked at together
constexpr long SHARES = 4;         // tasks for each thread, at least, so that all end together

struct Entry {
    float value;
    long id;
};

// The larger one, of equals the first id; NaN before all.
bool before(const Entry& a, const Entry& b) {
    const bool odd = a.value != a.value, other = b.value != b.value;
    if (odd != other) return odd;
    return !odd && a.value != b.value ? a.value > b.value : a.id < b.id;
}

// The first `room` of all entries that are offered in the order of their ids: a heap with the last of them on top.
class Top {
public:
    Top(Entry* entries, long room) : entries_(entries), room_(room) {}

    // Of a strip of logits, the first `count` of which are ids from `first` on.
    void offer(const float* strip, long first, long count) {
        if (room_ == 0) return;
        if (size_ == room_) {
            Ints wanted{};
            for (long i = 0; i < STRIP; i += LANES) wanted |= ~(load(strip + i) <= all(entries_[0].value));
            if (!any(wanted)) return;
        }
        for (long i = 0; i < count; i++) offer({strip[i], first + i});
    }

    long size() const { return size_; }

private:
    void offer(const Entry& entry) {
        if (size_ == room_) {
            if (!before(entry, entries_[0])) return;
            std::pop_heap(entries_, entries_ + size_--, before);
        }
        entries_[size_++] = entry;
        std::push_heap(entries_, entries_ + size_, before);
    }

    Entry* entries_;
    long room_, size_ = 0;
};

// Of a block: its largest logit, and the sum of exponents by how far each lies below it; NaN if there is a NaN.
struct Part {
    float best;
    double sum;
};

// Logits of a block, whose last strip is filled up with -inf.
class Block {
public:
    Block(const float* from, long count) : from_(from), count_(count) {
        const long left = count % STRIP;
        std::copy(from + count - left, from + count, last_);
        std::fill(last_ + left, last_ + STRIP, -INFINITY);
    }

    // Looks at all of it; `above` grows by how many are larger than `chosen`.
    Part read(long first, float chosen, long& above, Top& top) const {
        Floats best = all(-INFINITY), sums{};
        Ints larger_ones{};
        for (long at = 0; at < count_; at += STRIP) {
            const float* strip = strip_at(at);
            for (long i = 0; i < STRIP; i += LANES) {
                const Floats value = load(strip + i);
                best = larger(value, best);
                larger_ones -= value > all(chosen);
            }
            top.offer(strip, first + at, std::min(STRIP, count_ - at));
        }
        above += sum(larger_ones);
        const float found = largest(best), level = std::isfinite(found) ? found : 0;
        for (long at = 0; at < count_; at += STRIP)
            for (long i = 0; i < STRIP; i += LANES) sums += exp(load(strip_at(at) + i) - level);
        return {found, static_cast<double>(sum(sums))};
    }

private:
    const float* strip_at(long at) const { return at + STRIP <= count_ ? from_ + at : last_; }

    const float* from_;
    long count_;
    float last_[STRIP];
};

// The logarithm of a row's sum of exponents; the same whoever read its blocks.
float normaliser(const Part* parts, long blocks) {
    float best = -INFINITY;
    bool odd = false;
    for (long i = 0; i < blocks; i++) best = std::max(best, parts[i].best), odd = odd || parts[i].sum != parts[i].sum;
    if (odd) return NAN;
    if (!std::isfinite(best)) return best;
    double total = 0;
    for (long i = 0; i < blocks; i++) total += parts[i].sum * std::exp(static_cast<double>(parts[i].best - best));
    return static_cast<float>(static_cast<double>(best) + std::log(total));
}

// What a task leaves of its share of a row.
struct Share {
    long above, size;  // larger ids than the first one named; entries
    Entry* entries;
};

}  // namespace
}  // namespace anycore

// Of rows `which` [reported] of logits [.., count], or of the first ones if it is null: logprobs of ids, both [reported,
// named]; ranks [reported] of the first id of each; the `top` most likely ids, and theirs [reported, top]. An id that
// there is not gets NaN.
extern "C" void anycore_report(const float* logits, long count, const int64_t* which, long reported, const int64_t* ids,
                               long named, long top, float* logprobs, int64_t* ranks, int64_t* top_ids,
                               float* top_logprobs) {
    using namespace anycore;
    const auto row = [&](long i) { return logits + (which ? which[i] : i) * count; };
    const auto logit = [&](long i, int64_t id) { return id < 0 || id >= count ? NAN : row(i)[id]; };
    const long blocks = (count + BLOCK - 1) / BLOCK;
    const long wanted = std::clamp((SHARES * thread_count() + reported - 1) / std::max(reported, 1L), 1L, blocks);
    const long each = (blocks + wanted - 1) / wanted, shares = (blocks + each - 1) / each;  // blocks of a share
    const long room = std::min(top, each * BLOCK);
    static thread_local Scratch scratch;
    scratch.reserve(static_cast<size_t>(reported) * (static_cast<size_t>(blocks) * sizeof(Part) +
                                                     static_cast<size_t>(shares) * sizeof(Share) +
                                                     static_cast<size_t>(shares * room) * sizeof(Entry)),
                    3);
    Part* const parts = scratch.take<Part>(reported * blocks);
    Share* const all_shares = scratch.take<Share>(reported * shares);
    Entry* const entries = scratch.take<Entry>(reported * shares * room);
    parallel_for(reported * shares, [&](long task) {
        const long i = task / shares, start = task % shares * each;
        const float chosen = named ? logit(i, ids[i * named]) : NAN;
        Share share{0, 0, entries + task * room};
        Top found(share.entries, room);
        for (long block = start; block < std::min(blocks, start + each); block++) {
            const long first = block * BLOCK;
            parts[i * blocks + block] =
                Block(row(i) + first, std::min(BLOCK, count - first)).read(first, chosen, share.above, found);
        }
        share.size = found.size();
        all_shares[task] = share;
    });
    parallel_for(reported, [&](long i) {
        const float total = normaliser(parts + i * blocks, blocks);
        for (long n = i * named; n < (i + 1) * named; n++) logprobs[n] = logit(i, ids[n]) - total;
        Entry *const first = entries + i * shares * room, *end = first;
        ranks[i] = 1;
        for (const Share* share = all_shares + i * shares; share < all_shares + (i + 1) * shares; share++) {
            ranks[i] += share->above;
            end = std::copy(share->entries, share->entries + share->size, end);
        }
        std::partial_sort(first, first + top, end, before);
        for (long n = 0; n < top; n++) {
            top_ids[i * top + n] = first[n].id;
            top_logprobs[i * top + n] = first[n].value - total;
        }
    });
}
