#include "matmul_tiles.h"
#include "vectors_avx512.h"

namespace loramux {

MatmulKernel matmul_avx512(Dtype dtype, bool y_is_float32) { return matmul_over<Avx512>(dtype, y_is_float32); }

}  // namespace loramux
