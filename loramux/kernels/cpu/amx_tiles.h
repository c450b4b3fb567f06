// AMX tiles of 16 rows of 64 bytes, as `begin_tiles` (`matmul.h`) configures them: 0 to 3 are sums, 4 and 5 rows of the left operand, 6
// and 7 packed columns of the right one.
#pragma once

#include <cstdint>

namespace loramux {

constexpr int64_t TILE_SIZE = 16;
// Of the summed dimension, in bfloat16.
constexpr int64_t TILE_INPUTS = 32;

}  // namespace loramux
