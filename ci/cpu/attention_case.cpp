#include "attention_case.hpp"

#include <algorithm>
#include <vector>

#include "attention.hpp"
#include "check.hpp"

namespace check {
namespace {

using Row = std::vector<double>;

// What a byte of a rounded cache stands for: int8, or e4m3.
double level_of(uint8_t byte, int rounding) {
    if (rounding == 1) return static_cast<int8_t>(byte);
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    return byte & 0x80 ? -size : size;
}

// How far a number may be from what is stored of it, whose scale is bf16: half a step of its format.
double rounding_of(double x, double scale, int rounding) {
    if (rounding == 1) return scale * 0.502 + 1e-12;
    return std::max(std::fabs(x) / 15.9, scale * std::ldexp(1, -9)) + 1e-12;
}

Row row_of(Numbers& from, long first, long size) {
    Row row;
    for (long d = 0; d < size; d++) row.push_back(from[first + d]);
    return row;
}

// As a head is stored: normed, turned, and rounded to what it is kept in.
Row prepared(Row head, const float* norm, const float* cos, const float* sin, double eps, bool wide) {
    const long dim = static_cast<long>(head.size());
    if (norm) {
        double squares = 0;
        for (double x : head) squares += x * x;
        const double factor = 1 / std::sqrt(squares / static_cast<double>(dim) + eps);
        for (long d = 0; d < dim; d++) head[static_cast<size_t>(d)] *= factor * static_cast<double>(norm[d]);
    }
    for (long d = 0; cos && d < dim / 2; d++) {
        double &a = head[static_cast<size_t>(d)], &b = head[static_cast<size_t>(d + dim / 2)];
        const double x = a, y = b, c = static_cast<double>(cos[d]), s = static_cast<double>(sin[d]);
        a = x * c - y * s;
        b = y * c + x * s;
    }
    for (double& x : head) x = wide ? x : static_cast<double>(widen(narrow(static_cast<float>(x))));
    return head;
}

}  // namespace

void check_attention(const AttentionCase& shape) {
    Chance chance(shape.seed);
    const long heads = shape.kv_heads * shape.group, dim = shape.dim, block = shape.block_size;
    const double scale = 1 / std::sqrt(static_cast<double>(dim)), eps = 1e-5;
    Memory<int32_t> starts(shape.requests + 1), lengths(shape.requests);
    long rows = 0, longest = 0;
    for (long i = 0; i < shape.requests; i++) {
        starts[i] = static_cast<int32_t>(rows);
        rows += shape.lengths[i];
        const long length = shape.lengths[i] + (block ? shape.contexts[i] : 0);
        lengths[i] = static_cast<int32_t>(length);
        longest = std::max(longest, length);
    }
    starts[shape.requests] = static_cast<int32_t>(rows);

    // Rows of q, k and v lie in one matrix, as a fused projection leaves them, the last one with nothing behind it.
    const long width = (heads + 2 * shape.kv_heads) * dim, stride = width + shape.padding;
    Numbers qkv(std::max(0L, rows * stride - shape.padding), shape.wide, chance);
    Numbers before(std::max(0L, rows * stride - shape.padding), shape.wide);
    for (long i = 0; i < rows * stride - shape.padding; i++) before.set(i, static_cast<float>(qkv[i]));
    const long k_at = heads * dim, v_at = k_at + shape.kv_heads * dim, size = shape.wide ? 4 : 2;

    // Every block of every request is somewhere else; block 0 is nobody's.
    const long blocks = block ? (longest + block - 1) / block : 0;
    std::vector<int32_t> places;
    for (long i = 0; i < shape.requests * blocks; i++) places.push_back(static_cast<int32_t>(i + 1));
    for (long i = static_cast<long>(places.size()) - 1; i > 0; i--)
        std::swap(places[static_cast<size_t>(i)], places[static_cast<size_t>(chance.below(i + 1))]);
    Memory<int32_t> tables(std::max(1L, shape.requests * blocks));
    std::copy(places.begin(), places.end(), static_cast<int32_t*>(tables));
    const long all_heads = (shape.requests * blocks + 1) * shape.kv_heads * 2 * block;
    Numbers cache(shape.rounding ? 0 : all_heads * dim, shape.wide, chance);
    Memory<uint8_t> bytes(shape.rounding ? all_heads * dim : 0);
    Memory<uint16_t> scales(shape.rounding ? all_heads : 0);
    for (long i = 0; i < bytes.count(); i++) bytes[i] = static_cast<uint8_t>(chance.below(255) - 127) & 0xfe;
    for (long i = 0; i < scales.count(); i++) scales[i] = narrow(chance.number() / (shape.rounding == 1 ? 64 : 256));
    const auto in_cache = [&](long request, long token, long head, bool value) {
        const long at = tables[request * blocks + token / block];
        return (((at * shape.kv_heads + head) * 2 + value) * block + token % block) * dim;
    };
    for (long i = 0; block && i < shape.requests; i++)
        for (long token = lengths[i]; token < blocks * block; token++)  // nobody may look at what is not there yet
            for (long x = 0; x < shape.kv_heads * 2 * dim; x++) {
                const long place = in_cache(i, token, x / (2 * dim), x / dim % 2 != 0);
                shape.rounding ? void(scales[place / dim] = 0x7fc0) : cache.set(place + x % dim, NAN);
            }
    const auto held = [&](long place) {  // a head of the cache
        if (!shape.rounding) return row_of(cache, place, dim);
        Row row;
        for (long d = 0; d < dim; d++) {
            const double number = level_of(bytes[place + d], shape.rounding) * static_cast<double>(widen(scales[place / dim]));
            row.push_back(shape.wide ? number : static_cast<double>(widen(narrow(static_cast<float>(number)))));
        }
        return row;
    };
    Memory<int64_t> slots(std::max(1L, rows));
    for (long i = 0; block && i < shape.requests; i++)
        for (long r = 0; r < shape.lengths[i]; r++) {
            const long token = shape.contexts[i] + r;
            slots[starts[i] + r] = tables[i * blocks + token / block] * block + token % block;
        }

    Memory<float> q_norm(dim), k_norm(dim), cos(rows * (dim / 2) + 1), sin(rows * (dim / 2) + 1);
    for (long d = 0; d < dim; d++) q_norm[d] = chance.number(), k_norm[d] = chance.number();
    for (long i = 0; i < rows * (dim / 2); i++) {
        const float angle = chance.number() * 2;
        cos[i] = std::cos(angle), sin[i] = std::sin(angle);
    }
    Numbers out(rows * heads * dim, shape.wide);

    anycore::Attention what{};
    char* matrix = static_cast<char*>(qkv.data());
    what.q = matrix, what.k = matrix + k_at * size, what.v = matrix + v_at * size, what.out = out.data();
    what.cache = !block ? nullptr : shape.rounding ? static_cast<uint8_t*>(bytes) : cache.data();
    what.scales = shape.rounding ? static_cast<uint16_t*>(scales) : nullptr, what.rounding = shape.rounding;
    what.slots = slots, what.tables = tables, what.starts = starts, what.lengths = lengths;
    what.q_norm = shape.norms ? static_cast<float*>(q_norm) : nullptr;
    what.k_norm = shape.norms ? static_cast<float*>(k_norm) : nullptr;
    what.cos = shape.angles ? static_cast<float*>(cos) : nullptr;
    what.sin = shape.angles ? static_cast<float*>(sin) : nullptr;
    what.q_stride = what.k_stride = what.v_stride = stride, what.table_stride = blocks;
    what.rows = rows, what.requests = shape.requests, what.heads = heads, what.kv_heads = shape.kv_heads;
    what.head_dim = dim, what.block_size = block, what.window = shape.window;
    what.scale = static_cast<float>(scale), what.softcap = shape.softcap, what.eps = static_cast<float>(eps);
    what.causal = shape.causal, what.wide = shape.wide;
    anycore_attention(&what);

    for (long i = 0; i < shape.requests; i++) {
        const long length = lengths[i], context = length - shape.lengths[i];
        for (long kv = 0; kv < shape.kv_heads; kv++) {
            std::vector<Row> keys, values;
            for (long token = 0; token < length; token++) {
                if (token < context) {
                    keys.push_back(held(in_cache(i, token, kv, false)));
                    values.push_back(held(in_cache(i, token, kv, true)));
                    continue;
                }
                const long row = starts[i] + token - context;
                const float* turn = shape.angles ? cos + row * (dim / 2) : nullptr;
                keys.push_back(prepared(row_of(before, row * stride + k_at + kv * dim, dim), what.k_norm, turn,
                                        sin + row * (dim / 2), eps, shape.wide));
                values.push_back(row_of(before, row * stride + v_at + kv * dim, dim));
                if (shape.rounding) {
                    for (Row* row : {&keys.back(), &values.back()}) {
                        const long place = in_cache(i, token, kv, row == &values.back());
                        const double scale = static_cast<double>(widen(scales[place / dim]));
                        const Row kept = held(place);
                        for (size_t d = 0; d < row->size(); d++) {
                            const double wanted = (*row)[d], bound = rounding_of(wanted, scale, shape.rounding);
                            near(kept[d], wanted, bound + rounding(wanted, shape.wide, 10), "a rounded number");
                        }
                        *row = kept;
                    }
                    continue;
                }
                for (long d = 0; block && d < dim; d++) {
                    near(cache[in_cache(i, token, kv, false) + d], keys.back()[static_cast<size_t>(d)],
                         2 * rounding(keys.back()[static_cast<size_t>(d)], shape.wide, 10), "a stored key");
                    near(cache[in_cache(i, token, kv, true) + d], values.back()[static_cast<size_t>(d)], 0, "a stored value");
                }
            }
            for (long r = 0; r < shape.lengths[i]; r++)
                for (long head = kv * shape.group; head < (kv + 1) * shape.group; head++) {
                    const long row = starts[i] + r, at = context + r;
                    const float* turn = shape.angles ? cos + row * (dim / 2) : nullptr;
                    const Row query = prepared(row_of(before, row * stride + head * dim, dim), what.q_norm, turn,
                                               sin + row * (dim / 2), eps, shape.wide);
                    Row scores;
                    double top = -INFINITY, total = 0;
                    for (long token = 0; token < length; token++) {
                        double score = 0;
                        for (size_t d = 0; d < query.size(); d++) score += query[d] * keys[static_cast<size_t>(token)][d];
                        score *= scale;
                        if (shape.softcap != 0)
                            score = std::tanh(score / static_cast<double>(shape.softcap)) * static_cast<double>(shape.softcap);
                        const bool seen = (!shape.causal || token <= at) &&
                                          (shape.window == 0 || std::labs(token - at) < shape.window);
                        scores.push_back(seen ? score : -INFINITY);
                        top = std::max(top, scores.back());
                    }
                    for (double& score : scores) total += score = std::exp(score - top);
                    for (long d = 0; d < dim; d++) {
                        double wanted = 0, size_of = 0;
                        for (size_t token = 0; token < scores.size(); token++) {
                            wanted += scores[token] / total * values[token][static_cast<size_t>(d)];
                            size_of += scores[token] / total * std::fabs(values[token][static_cast<size_t>(d)]);
                        }
                        // bf16: weights are rounded, and so are stored keys, each within one part in 256.
                        const double bound = shape.wide ? 2e-4 : 0.02 * size_of + 0.02;
                        near(out[(row * heads + head) * dim + d], wanted, bound, "attention");
                    }
                }
        }
    }
}

}  // namespace check
