#include "lora_tiles.h"
#include "vectors_avx2.h"

namespace loramux {

LoraKernel lora_avx2(Dtype dtype) { return lora_kernel_over<Avx2>(dtype); }

}  // namespace loramux
