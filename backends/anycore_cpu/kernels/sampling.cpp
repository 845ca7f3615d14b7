// One id a row of logits, as `contract/sampling.py` says: temperature, top-k, top-p, min-p, then the draw. What is left
// out is found by counting how far below the largest the others lie: only ids around the edge are ever sorted.
#include <algorithm>
#include <array>
#include <cmath>

#include "interface.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "vectors.hpp"

namespace anycore {
namespace {

constexpr long PIECE = 256;      // ids whose weights are summed together
constexpr float GREEDY = 1e-5f;  // `GREEDY_BELOW`
constexpr float NOTHING = -87;   // weights are e to the power of distances above this, below they are 0

struct Best {
    float value;
    long id;
    bool finite;
};

Best best_of(const float* logits, long count) {
    Floats top = all(-INFINITY);
    Ints odd{};
    float found = -INFINITY;
    bool nan = false;
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats value = load(logits + i);
        top = larger(value, top);
        odd |= value != value;
    }
    for (; i < count; i++) {
        found = std::max(found, logits[i]);
        nan = nan || logits[i] != logits[i];
    }
    for (int lane = 0; lane < LANES; lane++) nan = nan || odd[lane] != 0;
    found = std::max(found, largest(top));
    for (i = 0; i < count - 1 && logits[i] != found;) i++;
    return {found, i, !nan && std::isfinite(found)};
}

// How far ids lie below the best one, and what they weigh.
struct Row {
    long count;
    float *distances, *weights;
};

// Ids nearer than the edge stay, and of those that lie at it the first ones.
struct Edge {
    float distance;
    long last;  // id
};

constexpr int BUCKETS = 2048;  // of distances, each a 64th wide; what is further, and -inf, is in the last

int bucket_of(float distance) {
    return distance < (BUCKETS - 1) / 64.0f ? static_cast<int>(distance * 64) : BUCKETS - 1;
}

class Ranks {
public:
    explicit Ranks(const Row& row) : row_(row) {
        for (long id = 0; id < row.count; id++) {
            Bucket& bucket = buckets_[static_cast<size_t>(bucket_of(row.distances[id]))];
            bucket.count++;
            bucket.mass += static_cast<double>(row.weights[id]);
        }
    }

    // Down the ranks, equals by id, for as long as `goes_on(count, mass)` of those above says so; at least one. `mass`
    // becomes that of all which stay.
    template <class GoesOn>
    Edge edge(const GoesOn& goes_on, double& mass) const {
        long above = 0;
        size_t at = 0;
        for (mass = 0; at < BUCKETS - 1; at++) {
            const Bucket& next = buckets_[at];
            if (!goes_on(above + next.count, mass + next.mass)) break;
            above += next.count;
            mass += next.mass;
        }
        List<Edge> ranked;
        for (long id = 0; id < row_.count; id++)
            if (bucket_of(row_.distances[id]) == static_cast<int>(at)) ranked.push_back({row_.distances[id], id});
        std::sort(ranked.begin(), ranked.end(), [](const Edge& a, const Edge& b) {
            return a.distance != b.distance ? a.distance < b.distance : a.last < b.last;
        });
        Edge found{INFINITY, row_.count};
        bool any = false;
        for (const Edge& next : ranked) {
            if (any && !goes_on(above, mass)) break;
            found = next;
            any = true;
            above++;
            mass += static_cast<double>(row_.weights[next.last]);
        }
        return found;
    }

private:
    struct Bucket {
        long count = 0;
        double mass = 0;
    };
    const Row& row_;
    std::array<Bucket, BUCKETS> buckets_{};
};

// Ids beyond the edge of top-k and top-p weigh nothing from here on.
void filter(const Row& row, long top_k, float top_p) {
    const Ranks ranks(row);
    double mass = 0;
    Edge edge = ranks.edge([&](long count, double) { return count < top_k; }, mass);
    if (top_p < 1) {
        const double wanted = static_cast<double>(top_p) * mass;
        const Edge other = ranks.edge([&](long, double above) { return above < wanted; }, mass);
        if (other.distance < edge.distance || (other.distance == edge.distance && other.last < edge.last)) edge = other;
    }
    for (long id = 0; id < row.count; id++) {
        const float distance = row.distances[id];
        if (distance > edge.distance || (distance == edge.distance && id > edge.last)) row.weights[id] = 0;
    }
}

// The first id up to which more weight lies than `uniform` of all.
long draw(const Row& row, double uniform, long best) {
    static thread_local List<double> pieces;
    pieces.clear();
    double total = 0;
    for (long first = 0; first < row.count; first += PIECE) {
        double mass = 0;
        for (long id = first; id < std::min(row.count, first + PIECE); id++) mass += static_cast<double>(row.weights[id]);
        pieces.push_back(mass);
        total += mass;
    }
    double left = uniform * total;
    long piece = 0;
    for (; piece + 1 < pieces.size() && pieces.begin()[piece] <= left; piece++) left -= pieces.begin()[piece];
    long found = best;
    for (long id = piece * PIECE; id < row.count; id++) {
        const double mass = static_cast<double>(row.weights[id]);
        if (mass > 0) found = id;  // rounding may leave nothing further on
        if (mass > left) break;
        left -= mass;
    }
    return found;
}

void weigh(const float* logits, float best, float temperature, float min_p, const Row& row) {
    const float top = best / temperature;
    const auto weights_of = [&](Floats distance) {
        const Floats weight = distance < -NOTHING ? exp(-distance) : Floats{};
        return weight < min_p ? Floats{} : weight;
    };
    long id = 0;
    for (; id + LANES <= row.count; id += LANES) {
        const Floats distance = top - load(logits + id) / temperature;
        store(row.distances + id, distance);
        store(row.weights + id, weights_of(distance));
    }
    for (; id < row.count; id++) {
        row.distances[id] = top - logits[id] / temperature;
        row.weights[id] = weights_of(all(row.distances[id]))[0];
    }
}

}  // namespace
}  // namespace anycore

// ids and finite [rows] from logits [rows, count]. Null: no top_k, top_p, min_p. `greedy`: no row is drawn.
extern "C" void anycore_sample(const float* logits, long rows, long count, const float* temperature,
                               const double* uniforms, const int64_t* top_k, const float* top_p, const float* min_p,
                               int greedy, int64_t* ids, bool* finite) {
    using namespace anycore;
    parallel_for(rows, [&](long i) {
        const float* from = logits + i * count;
        const Best best = best_of(from, count);
        ids[i] = best.id;
        finite[i] = best.finite;
        if (greedy || temperature[i] < GREEDY || !best.finite) return;
        static thread_local Scratch scratch;
        scratch.reserve(static_cast<size_t>(2 * count) * sizeof(float), 2);
        const Row row{count, scratch.take<float>(count), scratch.take<float>(count)};
        const long most = top_k ? std::clamp<long>(top_k[i], 1, count) : count;
        const float share = top_p ? top_p[i] : 1;
        const bool cut = most < count || share < 1;
        const float least = min_p ? min_p[i] : 0;
        weigh(from, best.value, temperature[i], cut ? 0 : least, row);
        if (cut) {  // top-p is a share of everything, min-p of the best
            filter(row, most, share);
            for (long id = 0; id < count; id++) row.weights[id] = row.weights[id] < least ? 0 : row.weights[id];
        }
        ids[i] = draw(row, uniforms[i], best.id);
    });
}

// Leaves `masked` rows of logits [rows, count] only the ids whose bits are set in words [masked, (count + 31) / 32].
extern "C" void anycore_mask(float* logits, long count, const int64_t* rows, const uint32_t* words, long masked) {
    using namespace anycore;
    const long length = (count + 31) / 32;
    parallel_for(masked, [&](long i) {
        float* row = logits + rows[i] * count;
        const uint32_t* allowed = words + i * length;
        for (long word = 0; word < length; word++) {
            const long first = word * 32, end = std::min(first + 32, count);
            if (allowed[word] == 0)
                std::fill(row + first, row + end, -INFINITY);
            else if (allowed[word] != ~0u)
                for (long id = first; id < end; id++)
                    if (!(allowed[word] >> (id - first) & 1)) row[id] = -INFINITY;
        }
    });
}
