#include "scratch.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace loramux {

static constexpr int64_t CACHE_LINE = 64;

void* Scratch::reserve(int64_t num_bytes) {
    if (num_bytes > num_bytes_) {
        const int64_t rounded = (num_bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
        memory_.reset(std::aligned_alloc(CACHE_LINE, rounded));
        if (!memory_) throw std::bad_alloc();
        std::memset(memory_.get(), 0, rounded);
        num_bytes_ = rounded;
    }
    return memory_.get();
}

void Scratch::Free::operator()(void* memory) const { std::free(memory); }

}  // namespace loramux
