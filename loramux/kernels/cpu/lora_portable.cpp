#include "lora_tiles.h"
#include "vectors_portable.h"

namespace loramux {

LoraKernel lora_portable(Dtype dtype) { return lora_kernel_over<Portable>(dtype); }

}  // namespace loramux
