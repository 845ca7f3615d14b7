// The shapes of AMX's tiles: 0-3 are sums of two blocks of rows by two of columns; 4 and 5 rows of x; 6 and 7 columns.
#pragma once

#include "vectors.hpp"

#if defined(__AMX_TILE__)

namespace anycore {

struct Tiles {  // what LDTILECFG reads
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// `bytes` of a row of x are multiplied at a time.
INLINE void shape_tiles(int upper, int lower, int bytes = 64) {
    Tiles tiles;
    for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
    tiles.rows[0] = tiles.rows[1] = tiles.rows[4] = static_cast<uint8_t>(upper);
    tiles.rows[2] = tiles.rows[3] = tiles.rows[5] = static_cast<uint8_t>(lower > 0 ? lower : 1);
    tiles.bytes[4] = tiles.bytes[5] = static_cast<uint16_t>(bytes);
    tiles.rows[6] = tiles.rows[7] = static_cast<uint8_t>(bytes / 4);
    _tile_loadconfig(&tiles);
}

}  // namespace anycore

#endif
