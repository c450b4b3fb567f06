#include "row_ops_vectors.h"
#include "vectors_avx512.h"

namespace loramux {

RowOps row_ops_avx512(Dtype dtype) { return row_ops_over<Avx512>(dtype); }

}  // namespace loramux
