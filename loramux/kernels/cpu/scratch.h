#pragma once

#include <cstdint>
#include <memory>

namespace loramux {

// Memory of whole cache lines that only grows, zero where nobody has written.
class Scratch {
   public:
    void* reserve(int64_t num_bytes);

   private:
    struct Free {
        void operator()(void* memory) const;
    };
    std::unique_ptr<void, Free> memory_;
    int64_t num_bytes_ = 0;
};

}  // namespace loramux
