// Every kernel over shapes by chance, against its definition in double: what sanitizers, valgrind and emulators run.
//
//     selftest SEED ROUNDS THREADS
#include <algorithm>
#include <vector>

#include "attention_case.hpp"
#include "check.hpp"
#include "quantised.hpp"

using namespace check;

namespace {

void check_linear(Chance& chance) {
    const bool wide = chance.coin(), wide_out = wide || chance.coin(), biased = chance.coin();
    const long rows = chance.between(1, 40), inputs = chance.between(1, 150), outputs = chance.between(1, 100);
    const long stride = inputs + chance.below(5), outer = inputs + chance.below(5);
    Numbers x((rows - 1) * stride + inputs, wide, chance), weight((outputs - 1) * outer + inputs, wide, chance);
    Numbers bias(outputs, wide, chance), out(rows * outputs, wide_out);
    Memory<char> packed(anycore_packed_size(outputs, inputs, wide) * (wide ? 4 : 2));
    anycore_pack(weight.data(), outer, outputs, inputs, wide, packed);
    anycore_linear(x.data(), rows, stride, packed, inputs, outputs, biased ? bias.data() : nullptr, out.data(), wide,
                   wide_out);
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < outputs; o++) {
            double wanted = biased ? bias[o] : 0;
            for (long i = 0; i < inputs; i++) wanted += x[r * stride + i] * weight[o * outer + i];
            near(out[r * outputs + o], wanted, rounding(wanted, wide_out, static_cast<double>(inputs)), "linear");
        }
}

void check_quantised(Chance& chance) {
    const long groups_of[] = {16, 32, 64, 128, 1L << 30};
    const bool wide = chance.coin(), biased = chance.coin();
    anycore::Quantised matrix{};
    matrix.bits = chance.coin() ? 8 : 4;
    matrix.minimums = matrix.bits == 4 && chance.coin();
    matrix.factor = 0.5f;
    matrix.outputs = chance.between(1, 80), matrix.inputs = chance.between(1, 300);
    matrix.group = groups_of[chance.below(5)];
    const long rows = chance.between(1, 40), inputs = matrix.inputs, outputs = matrix.outputs;
    const long group = std::min<long>(matrix.group, inputs), groups = (inputs + group - 1) / group;
    const bool float_scale = matrix.bits == 8 && groups == 1;
    if (float_scale) matrix.factor = 1;
    const auto half = [](long sixteenths) {  // 1/16 to 15/16 as a 16-bit float
        const int shift = 31 - __builtin_clz(static_cast<unsigned>(sixteenths));
        return static_cast<uint16_t>((shift - 4 + 15) << 10 | (sixteenths << (10 - shift) & 0x3ff));
    };
    Memory<uint8_t> numbers(outputs * inputs);
    Memory<float> scales(outputs * groups), minimums(outputs * groups);
    Memory<uint16_t> scale_bits(outputs * groups), minimum_bits(outputs * groups);
    for (long i = 0; i < outputs * inputs; i++) numbers[i] = static_cast<uint8_t>(matrix.bits == 4 ? chance.below(16) : chance.bits());
    for (long i = 0; i < outputs * groups; i++) {
        const long scale = chance.between(1, 15), minimum = chance.between(1, 15);
        scales[i] = static_cast<float>(scale) / 16 * matrix.factor, scale_bits[i] = half(scale);
        minimums[i] = static_cast<float>(minimum) / 16 * matrix.factor, minimum_bits[i] = half(minimum);
    }
    Memory<uint8_t> packed(anycore_quantised_size(&matrix));
    matrix.packed = packed;
    const void* given = float_scale ? static_cast<void*>(scales) : scale_bits;
    anycore_quantised_pack(&matrix, numbers, given, matrix.minimums ? static_cast<uint16_t*>(minimum_bits) : nullptr);
    const auto weight = [&](long o, long i) {
        const long at = o * groups + i / group;
        const double number = matrix.bits == 4 ? numbers[o * inputs + i] - 8 : static_cast<int8_t>(numbers[o * inputs + i]);
        return number * static_cast<double>(scales[at]) - (matrix.minimums ? static_cast<double>(minimums[at]) : 0);
    };

    Memory<int64_t> ids(5);
    for (long i = 0; i < 5; i++) ids[i] = chance.below(outputs);
    Numbers table(5 * inputs, true);
    anycore_quantised_rows(&matrix, ids, 5, table.data(), true);
    for (long i = 0; i < 5 * inputs; i++)
        near(table[i], weight(ids[i / inputs], i % inputs), 1e-4, "a quantised row");

    const long stride = inputs + chance.below(5);
    Numbers x((rows - 1) * stride + inputs, false, chance), bias(outputs, false, chance), out(rows * outputs, wide);
    anycore_quantised_linear(&matrix, static_cast<uint16_t*>(x.data()), rows, stride,
                             biased ? static_cast<uint16_t*>(bias.data()) : nullptr, out.data(), wide);
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < outputs; o++) {
            double wanted = biased ? bias[o] : 0, bound = 0;
            for (long g = 0; g < groups; g++) {
                double largest = 0, weights = 0;
                for (long i = g * group; i < std::min(inputs, (g + 1) * group); i++) {
                    wanted += x[r * stride + i] * weight(o, i);
                    largest = std::max(largest, std::fabs(x[r * stride + i]));
                    weights += std::fabs(weight(o, i));
                }
                bound += weights * largest / 127 * 0.51;  // each number of a row moves by half a step at most
            }
            near(out[r * outputs + o], wanted, bound + rounding(wanted, wide, static_cast<double>(inputs)) + 1e-3,
                 "quantised linear");
        }
}

void check_round(Chance& chance) {
    const bool wide = chance.coin(), exact = chance.coin();
    const long rows = chance.between(1, 80), columns = chance.between(1, 200);
    const long group = exact ? columns : chance.between(1, columns), groups = (columns + group - 1) / group;
    Numbers x(rows * columns, wide, chance);
    Memory<int8_t> numbers(rows * columns);
    Memory<float> scales(rows * groups);
    anycore_quantised_round(x.data(), rows, columns, group, wide, exact, numbers, scales);
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < columns; i++) {
            const double scale = scales[r * groups + i / group];  // a step; rounded down it may cut the largest number
            near(numbers[r * columns + i] * scale, x[r * columns + i], scale * (exact ? 0.501 : 1.01), "rounded");
        }
}

void check_norm(Chance& chance) {
    const bool wide = chance.coin(), centred = chance.coin(), biased = chance.coin(), added = chance.coin();
    const long rows = chance.between(1, 20), width = chance.between(1, 200);
    Numbers x(rows * width, wide, chance), residual(rows * width, wide, chance), sums(rows * width, wide);
    Numbers out(rows * width, wide);
    Memory<float> weight(width), bias(width);
    for (long i = 0; i < width; i++) weight[i] = chance.number(), bias[i] = chance.number();
    anycore_norm(x.data(), added ? residual.data() : nullptr, weight, biased ? static_cast<float*>(bias) : nullptr, 1e-3f,
                 rows, width, centred, wide, added ? sums.data() : x.data(), out.data());
    for (long r = 0; r < rows; r++) {
        std::vector<double> row;
        double mean = 0, squares = 0;
        for (long i = 0; i < width; i++) {
            if (added) {
                const double sum = x[r * width + i] + residual[r * width + i];
                near(sums[r * width + i], sum, rounding(sum, wide, 1), "a residual");
            }
            row.push_back(added ? sums[r * width + i] : x[r * width + i]);
            mean += centred ? row.back() / static_cast<double>(width) : 0;
        }
        for (double value : row) squares += (value - mean) * (value - mean);
        const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-3);
        for (long i = 0; i < width; i++) {
            const double wanted = (row[static_cast<size_t>(i)] - mean) * factor * static_cast<double>(weight[i]) +
                                  (biased ? static_cast<double>(bias[i]) : 0);
            near(out[r * width + i], wanted, rounding(wanted, wide, 10), "norm");
        }
    }
}

double activated(int kind, double x) {
    if (kind == 0) return x / (1 + std::exp(-x));
    if (kind == 1) return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    if (kind == 2) return x * 0.5 * (1 + std::tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
    return std::max(0.0, x);
}

void check_activation(Chance& chance) {
    const bool wide = chance.coin(), gated = chance.coin();
    const int kind = static_cast<int>(chance.below(4));
    const long rows = chance.between(1, 20), width = chance.between(1, 200), stride = gated ? 2 * width : width;
    Numbers x(rows * stride, wide, chance), out(rows * width, wide);
    anycore_activation(x.data(), rows, width, kind, gated, wide, out.data());
    for (long i = 0; i < rows * width; i++) {
        const long at = i / width * stride + i % width;
        const double wanted = activated(kind, x[at]) * (gated ? x[at + width] : 1);
        near(out[i], wanted, rounding(wanted, wide, 1), "activation");
    }
}

void check_ends(Chance& chance) {
    const bool wide = chance.coin(), second = chance.coin(), mean = chance.coin();
    const long rows = chance.between(1, 30), width = chance.between(1, 100), height = chance.between(1, 20);
    const bool each = chance.coin();  // the third table has a row for each
    Numbers table(height * width, wide, chance), other(width, wide, chance), sum(rows * width, wide);
    Numbers own(rows * width, wide, chance);
    Memory<int64_t> ids(rows);
    for (long r = 0; r < rows; r++) ids[r] = chance.below(height);
    anycore_gather(table.data(), ids, height, second ? other.data() : nullptr, nullptr, second,
                   second && each ? own.data() : nullptr, nullptr, 0, rows, width, 1.5f, wide, sum.data());
    for (long i = 0; i < rows * width; i++) {
        const double beside = second ? other[i % width] + (each ? own[i] : 0) : 0;
        const double wanted = 1.5 * (table[ids[i / width] * width + i % width] + beside);
        near(sum[i], wanted, rounding(wanted, wide, 2), "embedding");
    }

    Memory<float> frequencies(width), cos(rows * width), sin(rows * width);
    for (long i = 0; i < width; i++) frequencies[i] = 1.0f / static_cast<float>(i + 1);
    anycore_angles(ids, frequencies, 2, rows, width, cos, sin);
    for (long i = 0; i < rows * width; i++) {
        const double angle = static_cast<double>(ids[i / width]) * static_cast<double>(frequencies[i % width]);
        near(static_cast<double>(cos[i]), 2 * std::cos(angle), 1e-5, "cosine");
        near(static_cast<double>(sin[i]), 2 * std::sin(angle), 1e-5, "sine");
    }

    const long cut = chance.between(1, rows);
    Memory<int32_t> starts(cut == rows ? 2 : 3);
    starts[0] = 0, starts[1] = static_cast<int32_t>(cut);
    if (cut < rows) starts[2] = static_cast<int32_t>(rows);
    Numbers x(rows * width, wide, chance);
    Memory<float> pooled((starts.count() - 1) * width);
    anycore_pool(x.data(), starts, starts.count() - 1, width, mean, wide, pooled);
    for (long i = 0; i < pooled.count(); i++) {
        const long first = starts[i / width], last = starts[i / width + 1];
        double wanted = mean ? 0 : -INFINITY;
        for (long r = first; r < last; r++)
            wanted = mean ? wanted + x[r * width + i % width] / static_cast<double>(last - first)
                          : std::max(wanted, x[r * width + i % width]);
        near(static_cast<double>(pooled[i]), wanted, 1e-5, "pooling");
    }
}

void check_sampling(Chance& chance) {
    const long rows = chance.between(1, 4), count = chance.between(1, 3000);
    Memory<float> logits(rows * count), temperature(rows), top_p(rows), min_p(rows);
    Memory<double> uniforms(rows);
    Memory<int64_t> top_k(rows), ids(rows);
    Memory<bool> finite(rows);
    for (long i = 0; i < rows * count; i++) logits[i] = chance.number() * 5;
    for (long r = 0; r < rows; r++) {
        temperature[r] = static_cast<float>(chance.below(3)), uniforms[r] = static_cast<double>(chance.below(1000)) / 1000;
        top_k[r] = chance.between(1, 60), top_p[r] = static_cast<float>(chance.between(1, 10)) / 10;
        min_p[r] = static_cast<float>(chance.below(5)) / 10;
    }
    if (chance.below(4) == 0) logits[chance.below(count)] = NAN;
    if (chance.coin()) {
        Memory<int64_t> masked(1);
        Memory<uint32_t> words((count + 31) / 32);
        masked[0] = chance.below(rows);
        for (long word = 0; word < (count + 31) / 32; word++)
            words[word] = chance.coin() ? ~0u : static_cast<uint32_t>(chance.below(1 << 20));
        words[0] |= 1;
        anycore_mask(logits, count, masked, words, 1);
        for (long id = 0; id < count; id++) {
            const bool allowed = words[id / 32] >> (id % 32) & 1;
            require(allowed || logits[masked[0] * count + id] == -INFINITY, "sampling: a mask");
        }
        return;
    }
    const bool filtered = chance.coin();
    anycore_sample(logits, rows, count, temperature, uniforms, filtered ? static_cast<int64_t*>(top_k) : nullptr,
                   filtered ? static_cast<float*>(top_p) : nullptr, filtered ? static_cast<float*>(min_p) : nullptr, false,
                   ids, finite);
    for (long r = 0; r < rows; r++) {
        const float* row = logits + r * count;
        const bool whole = std::all_of(row, row + count, [](float x) { return std::isfinite(x); });
        require(finite[r] == whole, "sampling: finite");
        require(ids[r] >= 0 && ids[r] < count, "sampling: an id out of range");
        if (!whole) continue;
        const long above = std::count_if(row, row + count, [&](float x) { return x > row[ids[r]]; });
        require(above < (temperature[r] == 0 ? 1 : filtered ? top_k[r] : count), "sampling: beyond top-k");
    }
}

void check_edits(Chance& chance) {
    const long rows = chance.between(1, 4), height = rows + 1, count = chance.coin() ? chance.between(1, 300) : chance.between(16000, 33000);
    const long penalised = chance.below(rows + 1), number = chance.coin() ? chance.below(40) : 17000;
    Memory<float> logits(rows * count), repetition(penalised), presence(penalised), frequency(penalised), values(number);
    Memory<int32_t> counts(height * count);
    Memory<int64_t> which(penalised), places(penalised), at(number), ids(number);
    std::vector<double> wanted;
    for (long i = 0; i < rows * count; i++) logits[i] = chance.number() * 5, wanted.push_back(static_cast<double>(logits[i]));
    const long rare = chance.coin() ? 2 : 200;
    for (long i = 0; i < height * count; i++)
        counts[i] = chance.below(rare) ? 0 : static_cast<int32_t>(chance.below(4) + (chance.coin() ? 1 << 30 : 0));
    for (long i = 0; i < penalised; i++) {
        which[i] = i, places[i] = height - 1 - i;
        repetition[i] = static_cast<float>(chance.between(1, 30)) / 10, presence[i] = chance.number();
        frequency[i] = chance.number();
        for (long id = 0; id < count; id++) {
            const int32_t seen = counts[places[i] * count + id], often = seen & ((1 << 30) - 1);
            double& logit = wanted[static_cast<size_t>(i * count + id)];
            const double factor = static_cast<double>(repetition[i]);
            if (seen) logit = logit > 0 ? logit / factor : logit * factor;
            logit -= static_cast<double>(frequency[i]) * often + (often ? static_cast<double>(presence[i]) : 0);
        }
    }
    anycore_penalise(logits, rows, count, which, counts, height, places, repetition, presence, frequency, penalised);
    for (long i = 0; i < number; i++) {
        at[i] = chance.between(-1, rows), ids[i] = chance.between(-1, count), values[i] = chance.number();  // some are beside
        if (at[i] >= 0 && at[i] < rows && ids[i] >= 0 && ids[i] < count)
            wanted[static_cast<size_t>(at[i] * count + ids[i])] += static_cast<double>(values[i]);
    }
    anycore_add(logits, rows, count, at, ids, values, number);
    for (long i = 0; i < rows * count; i++)
        near(static_cast<double>(logits[i]), wanted[static_cast<size_t>(i)], 1e-3, "penalties and biases");
    anycore_ban(logits, rows, count, at, ids, number);
    for (long i = 0; i < number; i++)
        if (at[i] >= 0 && at[i] < rows && ids[i] >= 0 && ids[i] < count)
            wanted[static_cast<size_t>(at[i] * count + ids[i])] = -INFINITY;
    for (long i = 0; i < rows * count; i++)
        require((logits[i] == -INFINITY) == (wanted[static_cast<size_t>(i)] == -INFINITY), "bans");
}

void check_report(Chance& chance) {
    const long height = chance.between(1, 4), count = chance.coin() ? chance.between(1, 200) : chance.between(4000, 14000);
    const long reported = chance.coin() ? height : chance.below(height + 1), named = chance.between(1, 4);
    const long top = chance.coin() ? chance.below(std::min(count, 21L) + 1) : std::min(count, chance.between(1, 5000));
    const bool chosen = reported != height || chance.coin();
    Memory<float> logits(height * count), logprobs(reported * named), top_logprobs(reported * top);
    Memory<int64_t> which(reported), ids(reported * named), ranks(reported), top_ids(reported * top);
    for (long i = 0; i < height * count; i++) logits[i] = chance.below(9) ? chance.number() * 5 : -INFINITY;
    for (long r = 0; r < height; r++) logits[r * count + chance.below(count)] = 1;
    for (long i = 0; i < reported; i++) which[i] = chosen ? chance.below(height) : i;
    for (long i = 0; i < reported * named; i++) ids[i] = chance.below(count);
    anycore_report(logits, count, chosen ? static_cast<int64_t*>(which) : nullptr, reported, ids, named, top, logprobs, ranks,
                   top_ids, top_logprobs);
    for (long i = 0; i < reported; i++) {
        const float* row = logits + which[i] * count;
        double total = 0;
        for (long id = 0; id < count; id++) total += std::exp(static_cast<double>(row[id]));
        for (long n = 0; n < named; n++) {
            const float logit = row[ids[i * named + n]], got = logprobs[i * named + n];
            if (std::isinf(logit))
                require(got == -INFINITY, "a log-probability of what cannot be");
            else
                near(static_cast<double>(got), static_cast<double>(logit) - std::log(total), 1e-5, "a log-probability");
        }
        const float first = row[ids[i * named]];
        require(ranks[i] == 1 + std::count_if(row, row + count, [&](float x) { return x > first; }), "a rank");
        std::vector<long> order;
        for (long id = 0; id < count; id++) order.push_back(id);
        std::stable_sort(order.begin(), order.end(), [&](long a, long b) { return row[a] > row[b]; });
        for (long n = 0; n < top; n++) {
            require(top_ids[i * top + n] == order[static_cast<size_t>(n)], "the most likely ids");
            const float logit = row[order[static_cast<size_t>(n)]], got = top_logprobs[i * top + n];
            require(std::isinf(logit) ? got == -INFINITY
                                      : std::fabs(static_cast<double>(got - logit) + std::log(total)) < 1e-5,
                    "their log-probabilities");
        }
    }
}

void check_any_attention(Chance& chance) {
    const long dims[] = {2, 8, 16, 24, 64, 80, 128, 256}, blocks[] = {0, 1, 4, 16, 32};
    AttentionCase shape{};
    shape.kv_heads = chance.between(1, 3), shape.group = chance.between(1, 9), shape.dim = dims[chance.below(8)];
    shape.block_size = blocks[chance.below(5)];
    shape.requests = chance.between(1, 4);
    for (long i = 0; i < shape.requests; i++) {
        shape.lengths[i] = chance.coin() ? 1 : chance.between(1, 40);
        shape.contexts[i] = chance.coin() ? chance.below(40) : chance.below(700) / shape.dim;
    }
    if (shape.block_size && shape.dim <= 16 && chance.coin()) shape.contexts[0] = chance.between(500, 1200);
    shape.padding = chance.below(3);
    shape.window = chance.coin() ? 0 : chance.between(1, 50);
    shape.softcap = chance.coin() ? 0.0f : 5.0f;
    shape.causal = shape.block_size || chance.coin();
    shape.wide = chance.coin(), shape.norms = chance.coin(), shape.angles = chance.coin(), shape.seed = chance.bits();
    shape.rounding = shape.block_size && chance.coin() ? static_cast<int>(chance.between(1, 2)) : 0;
    check_attention(shape);
}

}  // namespace

int main(int count, char** words) {
    const auto word = [&](int i, long otherwise) { return count > i ? std::atol(words[i]) : otherwise; };
    if (anycore_prepare() != 0) return std::puts("the system does not let this process use the kernels"), 2;
    anycore_threads(static_cast<int>(word(3, 2)));
    Chance chance(static_cast<uint64_t>(word(1, 0)));
    for (long round = 0; round < word(2, 10); round++) {
        check_linear(chance);
        check_quantised(chance);
        check_round(chance);
        check_norm(chance);
        check_activation(chance);
        check_ends(chance);
        check_sampling(chance);
        check_edits(chance);
        check_report(chance);
        check_any_attention(chance);
    }
    std::printf("%ld numbers are right\n", checked);
}
