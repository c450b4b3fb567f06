#include "lora_avx512.h"

namespace loramux {

LoraKernel lora_avx512(LoraDtype dtype) { return kernel_for<Avx512Float32, Avx512Bfloat16>(dtype); }

}  // namespace loramux
