#include "sampling_loops.h"

namespace loramux {

SamplingKernel sampling_portable() { return SAMPLING_LOOPS; }

}  // namespace loramux
