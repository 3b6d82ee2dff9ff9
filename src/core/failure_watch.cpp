// SPDX-License-Identifier: Apache-2.0
#include "core/failure_watch.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "core/process.h"

namespace crossdock {
namespace {

// Short enough for a user who waits for the message, long enough to cost no CPU time.
constexpr auto kPeriod = std::chrono::milliseconds(50);

struct Watched {
    const HostVisibleStatus& status;
    std::function<void()> tell;
    bool is_seen = false;
    bool is_told = false;

    // One round after the failure, when the kernel has also written the reason, or at the end.
    void look(bool is_last) {
        if (is_told || __atomic_load_n(&status.failed, __ATOMIC_ACQUIRE) == 0) return;
        is_told = is_seen || is_last;
        is_seen = true;
        if (is_told) tell();
    }
};

// One thread for all groups of the process, while there are any.
class Rounds {
  public:
    ~Rounds() { stop(); }

    void stop() {
        if (is_inherited()) return;
        {
            const std::lock_guard lock(mutex_);
            is_over_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

    std::list<Watched>::iterator add(const HostVisibleStatus& status, std::function<void()> tell) {
        const std::lock_guard lock(mutex_);
        if (!thread_.joinable()) thread_ = start_thread([this] { run(); });
        return watched_.insert(watched_.end(), Watched{status, std::move(tell)});
    }

    void remove(std::list<Watched>::iterator watched) {
        if (is_inherited()) return;
        const std::lock_guard lock(mutex_);
        watched->look(true);
        watched_.erase(watched);
    }

    bool is_inherited() const { return process_ != getpid(); }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        while (!is_over_) {
            for (Watched& group : watched_) group.look(false);
            changed_.wait_for(lock, kPeriod);
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_over_ = false;
    std::list<Watched> watched_;
    const pid_t process_ = getpid();
    std::thread thread_;
};

const MadeAtLoad rounds_made_at_load(SharedInProcess<Rounds>::state);

}  // namespace

FailureWatch::Registration FailureWatch::watch(const HostVisibleStatus& status, std::function<void()> tell) {
    const std::shared_ptr<Rounds> rounds = SharedInProcess<Rounds>::get();
    const auto watched = rounds->add(status, std::move(tell));
    return Registration(nullptr, [rounds, watched](void*) { rounds->remove(watched); });
}

}  // namespace crossdock
