// How many threads to give work that is repeated every few milliseconds, while others may want the cores too.
#pragma once

namespace loramux {

// Threads of a team wait for each other hundreds of times a pass, and one whose core another process has taken keeps all waiting for its
// turn: on two cores beside one busy process a team of two is slower than one thread. So a team that lacks its cores for much of the time
// gets a thread less, and is tried whole again after a while: a second, twice as long each time that was in vain.
class TeamSize {
   public:
    explicit TeamSize(int most);

    // For a pass that begins at `now`, seconds of a clock that never goes back.
    int choose(double now);

    // A pass of so many seconds, ended `now`, by the number of threads chosen last, which had cores for cpu_seconds all together.
    void observe(double now, double seconds, double cpu_seconds);

   private:
    void begin_window();

    const int most_;
    int size_;
    double seconds_ = 0;
    double cpu_seconds_ = 0;
    double pause_;
    double whole_at_ = 0;
};

}  // namespace loramux
