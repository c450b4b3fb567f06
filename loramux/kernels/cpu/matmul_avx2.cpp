#include "matmul_tiles.h"
#include "vectors_avx2.h"

namespace loramux {

MatmulKernel matmul_avx2(Dtype dtype, bool y_is_float32) { return matmul_over<Avx2>(dtype, y_is_float32); }

}  // namespace loramux
