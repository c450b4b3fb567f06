#include "matmul_tiles.h"
#include "vectors_portable.h"

namespace loramux {

MatmulKernel matmul_portable(Dtype dtype, bool y_is_float32) { return matmul_over<Portable>(dtype, y_is_float32); }

}  // namespace loramux
