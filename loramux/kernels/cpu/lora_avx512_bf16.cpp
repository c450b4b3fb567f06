#include "lora_tiles.h"
#include "vectors_avx512.h"

namespace loramux {

LoraKernel lora_avx512_bf16(Dtype dtype) { return lora_kernel_over<Avx512>(dtype); }

}  // namespace loramux
