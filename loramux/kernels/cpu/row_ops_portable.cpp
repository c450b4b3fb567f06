#include "row_ops_vectors.h"
#include "vectors_portable.h"

namespace loramux {

RowOps row_ops_portable(Dtype dtype) { return row_ops_over<Portable>(dtype); }

}  // namespace loramux
