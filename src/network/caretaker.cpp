// SPDX-License-Identifier: Apache-2.0
#include "network/caretaker.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "core/process.h"
#include "network/mesh.h"

namespace crossdock::network {
namespace {

// While there is something to do, and when there has been nothing for long.
constexpr auto kShortNap = std::chrono::microseconds(200);
constexpr auto kLongNap = std::chrono::microseconds(3200);
constexpr uint64_t kIdleNs = 1'000'000;

// One thread for all meshes of the process, which lives while there is one.
class Rounds {
  public:
    ~Rounds() { stop(); }

    bool is_inherited() const { return process_ != getpid(); }

    // No mesh is looked after any more.
    void stop() {
        if (is_inherited()) return;
        {
            const std::lock_guard lock(mutex_);
            is_over_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

    void add(Mesh& mesh) {
        const std::lock_guard lock(mutex_);
        if (!thread_.joinable()) thread_ = start_thread([this] { run(); });
        meshes_.push_back(&mesh);
    }

    void remove(Mesh& mesh) {
        const std::lock_guard lock(mutex_);
        std::erase(meshes_, &mesh);
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        auto nap = kShortNap;
        while (!is_over_) {
            bool happened = false;
            for (Mesh* mesh : meshes_) happened |= mesh->progress_if_idle(kIdleNs);
            if (!happened) {
                changed_.wait_for(lock, nap);
                nap = std::min(2 * nap, kLongNap);
            } else {
                nap = kShortNap;
                lock.unlock();
                std::this_thread::yield();
                lock.lock();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_over_ = false;
    std::vector<Mesh*> meshes_;
    const pid_t process_ = getpid();
    std::thread thread_;
};

const MadeAtLoad rounds_made_at_load(SharedInProcess<Rounds>::state);

}  // namespace

Caretaker::Registration Caretaker::look_after(Mesh& mesh) {
    const std::shared_ptr<Rounds> rounds = SharedInProcess<Rounds>::get();
    rounds->add(mesh);
    return Registration(nullptr, [rounds, &mesh](void*) { rounds->remove(mesh); });
}

}  // namespace crossdock::network
