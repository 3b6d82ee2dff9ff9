// SPDX-License-Identifier: Apache-2.0
#include "network/progress_thread.h"

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

// Pause between rounds after activity, and after a long time without.
constexpr auto kShortPause = std::chrono::microseconds(200);
constexpr auto kLongPause = std::chrono::microseconds(3200);
constexpr uint64_t kIdleNs = 1'000'000;

// One thread for all meshes of the process. It ends with the last registration.
class SharedThread {
  public:
    ~SharedThread() { stop(); }

    bool is_inherited() const { return process_ != getpid(); }

    // Ends the thread.
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
        auto pause = kShortPause;
        while (!is_over_) {
            bool happened = false;
            for (Mesh* mesh : meshes_) happened |= mesh->progress_if_idle(kIdleNs);
            if (!happened) {
                changed_.wait_for(lock, pause);
                pause = std::min(2 * pause, kLongPause);
            } else {
                pause = kShortPause;
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

const MadeAtLoad thread_made_at_load(SharedInProcess<SharedThread>::state);

}  // namespace

ProgressThread::Registration ProgressThread::add(Mesh& mesh) {
    const std::shared_ptr<SharedThread> thread = SharedInProcess<SharedThread>::get();
    thread->add(mesh);
    return Registration(nullptr, [thread, &mesh](void*) { thread->remove(mesh); });
}

}  // namespace crossdock::network
