#pragma once

#include <cstdint>

namespace loramux {

// A matrix of a batch, rows `stride` elements apart.
struct Matrix {
    void* elements;
    int64_t num_rows;
    int64_t num_columns;
    int64_t stride;
};

}  // namespace loramux
