// The products of each instruction set, defined in the file of that name.
#pragma once

#include "matmul.h"

namespace loramux {

MatmulKernel matmul_portable(Dtype dtype, bool y_is_float32);
#ifdef LORAMUX_X86
MatmulKernel matmul_avx2(Dtype dtype, bool y_is_float32);
MatmulKernel matmul_avx512(Dtype dtype, bool y_is_float32);
MatmulKernel matmul_avx512_bf16(Dtype dtype, bool y_is_float32);
MatmulKernel matmul_amx(Dtype dtype, bool y_is_float32);

void begin_tiles_amx();
void end_tiles_amx();
#endif

}  // namespace loramux
