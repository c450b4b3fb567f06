#include "team_size.h"

#include <algorithm>

namespace loramux {

namespace {

// Seconds of passes after which a team is judged.
constexpr double WINDOW = 0.1;
constexpr double SHORTEST_PAUSE = 1, LONGEST_PAUSE = 8;
// A team of n that loses 1/n of its time is as fast as one of n - 1 that loses none. The smaller one finds its data no farther away and
// more of its turns whole, so that it is faster somewhat before.
constexpr double SHARE_LOST = 0.8;

}  // namespace

TeamSize::TeamSize(int most) : most_(most), size_(most), pause_(SHORTEST_PAUSE) {}

int TeamSize::choose(double now) {
    if (size_ < most_ && now >= whole_at_) {
        size_ = most_;
        begin_window();
    }
    return size_;
}

void TeamSize::observe(double now, double seconds, double cpu_seconds) {
    if (size_ == 1) return;
    seconds_ += seconds;
    cpu_seconds_ += cpu_seconds;
    if (seconds_ < WINDOW) return;
    const double lost = 1 - cpu_seconds_ / (size_ * seconds_);
    if (lost * size_ > SHARE_LOST) {
        if (size_ == most_) {
            whole_at_ = now + pause_;
            pause_ = std::min(2 * pause_, LONGEST_PAUSE);
        }
        --size_;
    } else if (size_ == most_) {
        pause_ = SHORTEST_PAUSE;
    }
    begin_window();
}

void TeamSize::begin_window() { seconds_ = cpu_seconds_ = 0; }

}  // namespace loramux
