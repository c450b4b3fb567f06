#include "row_ops_vectors.h"
#include "vectors_avx2.h"

namespace loramux {

RowOps row_ops_avx2(Dtype dtype) { return row_ops_over<Avx2>(dtype); }

}  // namespace loramux
