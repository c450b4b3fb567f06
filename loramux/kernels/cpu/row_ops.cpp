#include "row_ops.h"

#include <stdexcept>

namespace loramux {

RowOps row_ops(Isa isa, Dtype dtype) {
    if (!is_supported(isa)) throw std::invalid_argument("this machine does not run the instruction set asked for");
#ifdef LORAMUX_X86
    if (isa >= Isa::AVX512) return row_ops_avx512(dtype);
    if (isa == Isa::AVX2) return row_ops_avx2(dtype);
#endif
    return row_ops_portable(dtype);
}

}  // namespace loramux
