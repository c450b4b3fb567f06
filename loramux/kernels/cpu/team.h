// The threads of one piece of native work, which share out its phases.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace loramux {

// Time that the calling thread has had a core since it made the timer.
class CpuTimer {
   public:
    double seconds() const { return now() - start_; }

   private:
    static double now();

    const double start_ = now();
};

// What the threads of a team share.
class Team {
   public:
    // Runs body(member) on num_threads threads of the OpenMP pool (fewer if the pool has fewer), each with its own Member. Returns the
    // seconds that cores spent on it, all together.
    template <class Body>
    static double run(int num_threads, Body body);

   private:
    friend class Member;

    // The last of num_threads to arrive calls on_last before anyone goes on. Who waits spins for a while and then sleeps: on a machine
    // where others want the cores, the thread waited for may have been put aside for milliseconds, and takes the core that is let go.
    template <class OnLast>
    void meet(int num_threads, OnLast on_last);
    void wait(uint32_t round);
    void wake();

    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> num_arrived_{0};
    std::atomic<uint32_t> round_{0};
    std::atomic<int> num_asleep_{0};
};

// One thread's part in a team. All members call the same functions in the same order.
class Member {
   public:
    Member(Team& team, int index, int count) : index(index), count(count), team_(team) {}

    const int index;
    const int count;

    // Calls work(begin, end) for parts of [0, size) of at most `part`, each taken by whichever thread is free. Returns when all are done.
    template <class Work>
    void share(int64_t size, int64_t part, Work work) {
        take(size, part, work);
        meet();
    }

    // As `share`, but returns when there is nothing left to take. At most once before the next `meet`.
    template <class Work>
    void take(int64_t size, int64_t part, Work work) {
        if (count == 1) return work_all(size, part, work);
        for (int64_t begin; (begin = team_.next_.fetch_add(part, std::memory_order_relaxed)) < size;)
            work(begin, begin + part < size ? begin + part : size);
    }

    // Waits until every member is here.
    void meet() {
        if (count > 1) team_.meet(count, [this] { team_.next_.store(0, std::memory_order_relaxed); });
    }

   private:
    template <class Work>
    static void work_all(int64_t size, int64_t part, Work work) {
        for (int64_t begin = 0; begin < size; begin += part) work(begin, begin + part < size ? begin + part : size);
    }

    Team& team_;
};

template <class Body>
double Team::run(int num_threads, Body body) {
    Team team;
    if (num_threads == 1) {
        const CpuTimer timer;
        Member member(team, 0, 1);
        body(member);
        return timer.seconds();
    }
    double cpu_seconds = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : cpu_seconds)
    {
        const CpuTimer timer;
        Member member(team, omp_get_thread_num(), omp_get_num_threads());
        body(member);
        cpu_seconds = timer.seconds();
    }
    return cpu_seconds;
}

template <class OnLast>
void Team::meet(int num_threads, OnLast on_last) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads) return wait(round);
    num_arrived_.store(0, std::memory_order_relaxed);
    on_last();
    round_.store(round + 1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst)) wake();
}

}  // namespace loramux
