// Rows times a panel: the one product that linears and attention over several rows are made of.
//
// A panel is 32 columns of a matrix, ready to be multiplied: [inputs / 2][32][2] of bf16, [inputs][32] of float. The sum
// of each number runs over the inputs in order, however many rows there are: a row never feels its company.
#pragma once

#include "vectors.hpp"

namespace anycore {

constexpr int COLUMNS = 32;

#if defined(__AMX_BF16__)
constexpr long INPUT_STEP = 32;  // bf16 inputs of a panel, and of the rows it meets, are padded with zeros to these
#else
constexpr long INPUT_STEP = 2;
#endif

template <class T>
constexpr long padded_inputs(long inputs) {
    constexpr long step = sizeof(T) == 2 ? INPUT_STEP : 1;
    return (inputs + step - 1) / step * step;
}

// out[rows][32] (+)= x[rows][inputs] * panel, with inputs = padded_inputs. Rows of x and out lie a stride apart.
void multiply(long rows, const float* x, long stride, const float* panel, long inputs, float* out, long out_stride,
              bool add);
void multiply(long rows, const bf16* x, long stride, const bf16* panel, long inputs, float* out, long out_stride,
              bool add);

// Rows that meet many panels are laid out for them once. With AMX those of bf16 lie in tiles, [inputs / 32][16][32], each
// read from end to end; others lie one after the other, padded. A block of n rows takes n * padded_inputs numbers.
#if defined(__AMX_BF16__)
constexpr long BLOCK = 32;  // rows that meet a panel at a time
template <class T>
constexpr bool IN_TILES = sizeof(T) == 2;
#else
constexpr long BLOCK = 96;
template <class T>
constexpr bool IN_TILES = false;
#endif

void lay_out(const float* x, long rows, long stride, long inputs, float* out);
void lay_out(const bf16* x, long rows, long stride, long inputs, bf16* out);

// Multiplies blocks of rows, one after the other on one thread, as `multiply` does with rows that are not laid out.
class Blocks {
public:
    // out[rows][32] = x * panel. `stride` is that of rows that do not lie in tiles. `cold`: the panel comes from memory.
    void multiply(long rows, const float* x, long stride, const float* panel, long inputs, float* out, bool cold);
    void multiply(long rows, const bf16* x, long stride, const bf16* panel, long inputs, float* out, bool cold);

    Blocks() = default;
    Blocks(const Blocks&) = delete;
    Blocks& operator=(const Blocks&) = delete;
    ~Blocks();

private:
    long shaped_ = 0;  // rows that tiles have; shaping them takes as long as a tenth of a product
};

}  // namespace anycore
