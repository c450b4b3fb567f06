#include "sampling_loops.h"

namespace loramux {

SamplingKernel sampling_avx2() { return SAMPLING_LOOPS; }

}  // namespace loramux
