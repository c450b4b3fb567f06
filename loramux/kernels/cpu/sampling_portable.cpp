#include "sampling_loops.h"

namespace loramux {

SamplingKernel sampling_portable() { return {peak, weigh, sum_spans, collect, count_above}; }

}  // namespace loramux
