// SPDX-License-Identifier: Apache-2.0
#include "core/failure_watch.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "core/process.h"

namespace crossdock {
namespace {

// A person who waits for the message does not notice it, and neither does the CPU.
constexpr auto kPeriod = std::chrono::milliseconds(50);

struct Watched {
    const HostVisibleStatus& status;
    std::function<void()> tell;
    bool is_seen = false;
    bool is_told = false;

    // One round after the failure, when the kernel has also written down why, or at the end.
    void look(bool is_last) {
        if (is_told || __atomic_load_n(&status.failed, __ATOMIC_ACQUIRE) == 0) return;
        is_told = is_seen || is_last;
        is_seen = true;
        if (is_told) tell();
    }
};

// One thread for all groups of the process, which lives while there is one.
class Rounds {
  public:
    static std::shared_ptr<Rounds> make() {
        return std::shared_ptr<Rounds>(new Rounds, [](Rounds* rounds) {
            // A forked process has the object, but not the thread, which may hold the mutex, and for whose end the
            // destructor of the condition variable would wait.
            if (!rounds->is_in_child()) delete rounds;
        });
    }
    ~Rounds() { stop(); }

    void stop() {
        if (is_in_child()) return;
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

    void remove(std::list<Watched>::iterator place) {
        if (is_in_child()) return;
        const std::lock_guard lock(mutex_);
        place->look(true);
        watched_.erase(place);
    }

    bool is_in_child() const { return process_ != getpid(); }

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

struct Current {
    // Also in a forked child, which has none of its parent's thread.
    std::shared_ptr<Rounds> get() {
        const std::lock_guard lock(mutex);
        std::shared_ptr<Rounds> rounds = object.lock();
        if (rounds == nullptr || rounds->is_in_child()) object = rounds = Rounds::make();
        if (!stops_at_exit) stops_at_exit = std::atexit(stop) == 0;
        return rounds;
    }

    // At the process's end, before CUDA takes back the memory that the thread reads.
    static void stop();

    ForkSafeMutex mutex;
    std::weak_ptr<Rounds> object;
    bool stops_at_exit = false;
};

Current& current() {
    static auto* instance = new Current;
    return *instance;
}
const MadeAtLoad made_at_load(current);

void Current::stop() {
    if (const auto rounds = current().object.lock()) rounds->stop();
}

}  // namespace

FailureWatch::Place FailureWatch::watch(const HostVisibleStatus& status, std::function<void()> tell) {
    const std::shared_ptr<Rounds> rounds = current().get();
    const auto place = rounds->add(status, std::move(tell));
    return Place(nullptr, [rounds, place](void*) { rounds->remove(place); });
}

}  // namespace crossdock
