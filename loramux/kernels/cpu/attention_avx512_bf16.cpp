#include "attention_tiles.h"
#include "vectors_avx512.h"

namespace loramux {

AttentionKernel attention_avx512_bf16(Dtype dtype) { return attention_over<Avx512>(dtype); }

}  // namespace loramux
