// SPDX-License-Identifier: Apache-2.0
#include "fake_device.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "core/error.h"
#include "plugin/objects.h"

namespace crossdock::network {
namespace {

uint64_t g_seed = 1;
uint64_t g_staging_bytes = uint64_t{4} << 20;
uint64_t g_good_steps = UINT64_MAX;

void require_health() { require(g_good_steps > 0, ncclSystemError, "the device has failed"); }

// Steps of one direction, executed in order by a slow thread.
class FakeQueue {
  public:
    explicit FakeQueue(uint64_t seed) : random_(seed), thread_([this] { run(); }) {}
    ~FakeQueue() {
        is_over_ = true;
        thread_.join();
    }

    uint64_t push(std::function<void()> step) {
        require_health();
        --g_good_steps;
        const std::lock_guard lock(mutex_);
        steps_.push_back(std::move(step));
        return ++queued_;
    }
    uint64_t done() const { return done_.load(std::memory_order_acquire); }

  private:
    void run() {
        while (!is_over_) {
            std::function<void()> step;
            {
                const std::lock_guard lock(mutex_);
                if (!steps_.empty()) {
                    step = std::move(steps_.front());
                    steps_.pop_front();
                }
            }
            if (step) {
                step();
                done_.fetch_add(1, std::memory_order_release);
            }
            if (!step || random_() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 50));
        }
    }

    std::mt19937_64 random_;
    std::mutex mutex_;
    std::deque<std::function<void()>> steps_;
    uint64_t queued_ = 0;
    std::atomic<uint64_t> done_{0};
    std::atomic<bool> is_over_{false};
    std::thread thread_;
};

class FakeDevice : public DeviceMemory {
  public:
    FakeDevice() : staging_(2 * g_staging_bytes), in_(g_seed), out_(g_seed + 1) {}

    std::span<std::byte> staging_in() override { return std::span(staging_).first(staging_.size() / 2); }
    std::span<std::byte> staging_out() override { return std::span(staging_).last(staging_.size() / 2); }

    uint64_t copy_in(void* device, const std::byte* staging, uint64_t bytes) override {
        return in_.push([=] { std::memcpy(device, staging, bytes); });
    }
    uint64_t write_word(void* device, uint64_t value) override {
        return in_.push([=] { std::atomic_ref(*static_cast<uint64_t*>(device)).store(value); });
    }
    uint64_t read_word(std::byte* staging, const void* device) override {
        return in_.push([=] {
            const uint64_t word = std::atomic_ref(*static_cast<uint64_t*>(const_cast<void*>(device))).load();
            std::memcpy(staging, &word, sizeof(word));
        });
    }
    uint64_t copy_out(std::byte* staging, const void* device, uint64_t bytes) override {
        return out_.push([=] { std::memcpy(staging, device, bytes); });
    }
    uint64_t done_in() override {
        require_health();
        return in_.done();
    }
    uint64_t done_out() override {
        require_health();
        return out_.done();
    }

  private:
    std::vector<std::byte> staging_;
    FakeQueue in_, out_;
};

}  // namespace

void set_fake_device_seed(uint64_t seed) { g_seed = seed; }
void set_fake_device_failure(uint64_t steps) { g_good_steps = steps; }
void set_fake_staging_bytes(uint64_t bytes) { g_staging_bytes = bytes; }

}  // namespace crossdock::network

std::unique_ptr<crossdock::network::DeviceMemory> crossdock::plugin::make_device_memory() {
    if (network::g_seed == 0) return nullptr;
    return std::make_unique<network::FakeDevice>();
}
