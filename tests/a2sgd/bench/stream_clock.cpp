// SPDX-License-Identifier: Apache-2.0
#include "tests/a2sgd/bench/stream_clock.h"

#include <chrono>
#include <cstring>
#include <utility>

namespace crossdock::bench {
namespace {

// Everything is done when a call returns.
class CpuClock : public StreamClock {
  public:
    void mark() override { marks_.push_back(std::chrono::steady_clock::now()); }
    std::vector<double> laps_us() override {
        std::vector<double> laps;
        for (size_t i = 1; i < marks_.size(); ++i)
            laps.push_back(std::chrono::duration<double, std::micro>(marks_[i] - marks_[i - 1]).count());
        marks_.clear();
        return laps;
    }
    void copy(void* target, const void* source, size_t bytes) override { std::memcpy(target, source, bytes); }

  private:
    std::vector<std::chrono::steady_clock::time_point> marks_;
};

}  // namespace

std::unique_ptr<StreamClock> make_cpu_clock() { return std::make_unique<CpuClock>(); }

}  // namespace crossdock::bench
