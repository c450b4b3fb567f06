#include "team.h"

#include <time.h>

#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace loramux {

namespace {

// About 100 us on Intel's cores and 30 on AMD's: longer than threads of one phase are ever apart while both run.
constexpr int SPINS = 2000;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#if defined(__linux__)

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

void sleep_while(std::atomic<uint32_t>& value, uint32_t is) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT_PRIVATE, is, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

#else

void sleep_while(std::atomic<uint32_t>&, uint32_t) { std::this_thread::yield(); }

void wake_all(std::atomic<uint32_t>&) {}

#endif

}  // namespace

double CpuTimer::now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void Team::wait(uint32_t round) {
    for (int spin = 0; spin < SPINS; ++spin) {
        if (round_.load(std::memory_order_acquire) != round) return;
        pause();
    }
    num_asleep_.fetch_add(1, std::memory_order_seq_cst);
    while (round_.load(std::memory_order_seq_cst) == round) sleep_while(round_, round);
    num_asleep_.fetch_sub(1, std::memory_order_relaxed);
}

void Team::wake() { wake_all(round_); }

}  // namespace loramux
