#include "sampling_loops.h"

namespace loramux {

SamplingKernel sampling_avx512() { return SAMPLING_LOOPS; }

}  // namespace loramux
