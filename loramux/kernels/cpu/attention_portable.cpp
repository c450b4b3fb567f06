#include "attention_tiles.h"
#include "vectors_portable.h"

namespace loramux {

AttentionKernel attention_portable(Dtype dtype) { return attention_over<Portable>(dtype); }

}  // namespace loramux
