#include "attention_tiles.h"
#include "vectors_avx2.h"

namespace loramux {

AttentionKernel attention_avx2(Dtype dtype) { return attention_over<Avx2>(dtype); }

}  // namespace loramux
