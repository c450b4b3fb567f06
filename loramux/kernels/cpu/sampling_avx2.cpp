#include "sampling_loops.h"

namespace loramux {

SamplingKernel sampling_avx2() { return {peak, weigh, sum_spans, collect, count_above}; }

}  // namespace loramux
