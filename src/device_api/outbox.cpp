// SPDX-License-Identifier: Apache-2.0
#include "device_api/outbox.h"

#include <sched.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/process.h"
#include "device/cpu/remote_memory.h"
#include "runtime/cpu/clock.h"
#include "runtime/cpu/idle_backoff.h"
#include "runtime/cpu/local_put.h"

namespace crossdock::device_api {
namespace {

constexpr size_t kDefaultDepth = 128;
constexpr int kBatch = 64;  // descriptors of one queue in a row
// Idle rounds before the proxy sleeps: about 1 ms. If it shares a core with its rank it sleeps almost at once, because
// the scheduler prefers a thread that wakes up to one that keeps yielding.
constexpr int kRoundsAwake = 2'200;
constexpr int kSharedRoundsAwake = 4;
constexpr uint64_t kLastDrainNs = 5'000'000'000;

}  // namespace

GinType chosen_type() {
    const char* text = std::getenv("NCCL_GIN_TYPE");
    const std::string_view value = text == nullptr ? "" : text;
    if (value == "2") return GinType::kProxy;
    require(value.empty() || value == "-1" || value == "3" || value == "4", ncclInvalidUsage,
            "NCCL_GIN_TYPE is {}, allowed: 2 (proxy), or 3, 4 or -1 (direct)", value);
    return GinType::kDirect;
}

void store_value(std::byte* target, uint64_t value, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(target) % bytes != 0) {
        std::memcpy(target, &value, bytes);
        return;
    }
    switch (bytes) {
        case 8:
            return __atomic_store_n(reinterpret_cast<uint64_t*>(target), value, __ATOMIC_RELEASE);
        case 4:
            return __atomic_store_n(reinterpret_cast<uint32_t*>(target), static_cast<uint32_t>(value),
                                    __ATOMIC_RELEASE);
        case 2:
            return __atomic_store_n(reinterpret_cast<uint16_t*>(target), static_cast<uint16_t>(value),
                                    __ATOMIC_RELEASE);
        default:
            std::memcpy(target, &value, bytes);
    }
}

void carry_out_local(const Descriptor& descriptor) {
    if (descriptor.bytes > 0) {
        if (descriptor.is_value) {
            store_value(descriptor.target, descriptor.value, descriptor.bytes);
        } else {
            cpu::put_local(descriptor.target, descriptor.source, descriptor.bytes);
        }
    }
    if (descriptor.counter != nullptr) __atomic_fetch_add(descriptor.counter, 1, __ATOMIC_RELEASE);
    if (descriptor.has_signal) __atomic_fetch_add(descriptor.signal, descriptor.increase, __ATOMIC_RELEASE);
}

Outbox::Outbox(GinType type, int num_ranks, int num_contexts, int depth, int ranks_on_machine, bool has_remote_peers)
    : type_(type),
      num_ranks_(num_ranks),
      num_spins_(cpu::IdleBackoff::spins_for(ranks_on_machine, 2)),
      has_remote_peers_(has_remote_peers) {
    const size_t queue_depth = type == GinType::kDirect ? 1 : depth == 0 ? kDefaultDepth : static_cast<size_t>(depth);
    for (int i = 0; i < num_ranks * num_contexts; ++i) lanes_.push_back(std::make_unique<Lane>(queue_depth));
    if (type == GinType::kProxy && num_contexts > 0) proxy_ = start_thread([this] { run_proxy(); });
}

Outbox::~Outbox() {
    try {
        drain(kLastDrainNs);
    } catch (const Error&) {  // no more sources will be read
    }
    is_over_.store(true);
    wake();
    if (proxy_.joinable()) proxy_.join();
}

// ---- Both ways ----

void Outbox::carry_out(Lane& lane, int context, int peer, const Descriptor& descriptor) {
    if (!descriptor.is_remote) {
        carry_out_local(descriptor);
        lane.posted.fetch_add(1, std::memory_order_relaxed);
        lane.num_read.fetch_add(1, std::memory_order_release);
        return;
    }
    const cpu::RemoteSignal signal{descriptor.has_signal ? descriptor.signal_memory : nullptr, descriptor.signal_offset,
                                   descriptor.increase, descriptor.is_strong};
    const std::lock_guard lock(lane.mutex);
    network::Operation* operation = nullptr;
    const cpu::RemoteMemory* memory = descriptor.target_memory;
    if (descriptor.bytes == 0) {
        if (signal.memory != nullptr) signal.memory->raise(context, peer, signal);
    } else if (descriptor.is_get) {
        memory = descriptor.source_memory;
        operation =
            descriptor.source_memory->start_get(context, peer, descriptor.source_offset, *descriptor.target_memory,
                                                descriptor.target_offset, descriptor.bytes);
    } else if (descriptor.is_value) {
        descriptor.target_memory->put_value(context, peer, descriptor.target_offset, descriptor.value, descriptor.bytes,
                                            signal);
    } else {
        operation =
            descriptor.target_memory->start_put(context, peer, descriptor.target_offset, *descriptor.source_memory,
                                                descriptor.source_offset, descriptor.bytes, signal);
    }
    lane.posted.fetch_add(1, std::memory_order_relaxed);
    lane.under_way.push_back({operation, memory, descriptor.counter});
    end_some(lane);
}

// Requires lane.mutex. Returns true if an operation has ended.
bool Outbox::end_some(Lane& lane) {
    bool has_ended = false;
    while (!lane.under_way.empty()) {
        const UnderWay& first = lane.under_way.front();
        if (first.operation != nullptr && !first.memory->has_ended(first.operation)) break;
        if (first.counter != nullptr) __atomic_fetch_add(first.counter, 1, __ATOMIC_RELEASE);
        lane.under_way.pop_front();
        lane.num_read.fetch_add(1, std::memory_order_release);
        has_ended = true;
    }
    return has_ended;
}

bool Outbox::try_post(int context, int peer, const Descriptor& descriptor) {
    Lane& to = lane(context, peer);
    if (type_ == GinType::kDirect) {
        carry_out(to, context, peer, descriptor);
        return true;
    }
    if (!to.queue.try_push(descriptor)) return false;
    if (is_asleep_.load() != 0) wake();
    return true;
}

uint64_t Outbox::num_posted(int context, int peer) const {
    const Lane& to = lane(context, peer);
    return type_ == GinType::kDirect ? to.posted.load(std::memory_order_relaxed) : to.queue.num_pushed();
}

bool Outbox::has_read(int context, int peer, uint64_t number) const {
    return lane(context, peer).num_read.load(std::memory_order_acquire) >= number;
}

void Outbox::progress(int context) {
    if (type_ == GinType::kProxy) {
        // If the proxy has no core of its own, let it run.
        if (num_spins_ == 0 && has_queued(context)) sched_yield();
        if (!has_failed_.load(std::memory_order_acquire)) return;
        const std::lock_guard lock(failure_mutex_);
        fail(ncclRemoteError, "the GIN proxy has stopped: {}", failure_);
    }
    for (int peer = 0; has_remote_peers_ && peer < num_ranks_; ++peer) {
        Lane& to = lane(context, peer);
        if (to.posted.load(std::memory_order_relaxed) == to.num_read.load(std::memory_order_relaxed)) continue;
        const std::lock_guard lock(to.mutex);
        end_some(to);
    }
}

bool Outbox::drain(uint64_t timeout_ns) {
    const uint64_t deadline_ns = cpu::saturating_add(cpu::steady_now_ns(), timeout_ns);
    const int num_contexts = static_cast<int>(lanes_.size()) / num_ranks_;
    Interruption interruption;
    for (int context = 0; context < num_contexts; ++context) {
        for (int peer = 0; peer < num_ranks_; ++peer) {
            const uint64_t number = num_posted(context, peer);
            while (!has_read(context, peer, number)) {
                if (cpu::steady_now_ns() >= deadline_ns || interruption.has_come()) return false;
                progress(context);
                sched_yield();
            }
        }
    }
    return true;
}

std::string Outbox::state(int context) const {
    if (type_ == GinType::kDirect) return {};
    std::string lanes;
    for (int peer = 0; peer < num_ranks_; ++peer) {
        const Lane& to = lane(context, peer);
        const uint64_t pushed = to.queue.num_pushed();
        const uint64_t posted = to.posted.load(std::memory_order_relaxed);
        const uint64_t num_read = to.num_read.load(std::memory_order_relaxed);
        if (pushed == 0) continue;
        lanes += fmt::format("{} to rank {}: {} queued, {} posted, {} of them read", lanes.empty() ? "" : ";", peer,
                             pushed, posted, num_read);
    }
    return fmt::format("; the proxy {}:{}", is_asleep_.load(std::memory_order_relaxed) != 0 ? "sleeps" : "is awake",
                       lanes.empty() ? " nothing was queued in this context" : lanes);
}

// ---- The proxy ----

void Outbox::run_proxy() {
    cpu::IdleBackoff backoff(num_spins_);
    const int rounds_awake = num_spins_ == 0 ? kSharedRoundsAwake : kRoundsAwake;
    int num_idle = 0;
    for (;;) {
        bool is_busy = false;
        if (work_once(is_busy)) {
            backoff.reset();
            num_idle = 0;
        } else if (is_over_.load()) {
            return;
        } else if (is_busy || ++num_idle < rounds_awake) {
            backoff.idle(UINT64_MAX);
        } else {
            num_idle = 0;
            backoff.reset();
            // A pushing thread reads this flag after its push; the queues are read here after the flag is set.
            is_asleep_.store(1);
            if (!is_queue_empty() || is_over_.load()) {
                is_asleep_.store(0);
            } else {
                is_asleep_.wait(1);
            }
        }
    }
}

// Returns true if anything happened. is_busy: the network has pending operations.
bool Outbox::work_once(bool& is_busy) {
    bool happened = false;
    for (size_t i = 0; i < lanes_.size(); ++i) {
        Lane& each = *lanes_[i];
        const auto num_ranks = static_cast<size_t>(num_ranks_);
        const auto context = static_cast<int>(i / num_ranks), peer = static_cast<int>(i % num_ranks);
        const auto under_way = [&] {
            return each.posted.load(std::memory_order_relaxed) - each.num_read.load(std::memory_order_relaxed);
        };
        try {
            if (under_way() > 0) {
                const std::lock_guard lock(each.mutex);
                happened |= end_some(each);
            }
            for (int taken = 0; taken < kBatch && under_way() < each.queue.depth(); ++taken) {
                const Descriptor* next = each.queue.front();
                if (next == nullptr) break;
                happened = true;
                if (has_failed_.load(std::memory_order_relaxed)) {
                    each.posted.fetch_add(1, std::memory_order_relaxed);
                } else {
                    carry_out(each, context, peer, *next);
                }
                each.queue.pop();
            }
            is_busy |= under_way() > 0;
        } catch (const std::exception& error) {
            fail_proxy(error.what());
        }
    }
    return happened;
}

bool Outbox::has_queued(int context) const {
    for (int peer = 0; peer < num_ranks_; ++peer) {
        const Lane& to = lane(context, peer);
        if (to.queue.num_pushed() != to.posted.load(std::memory_order_relaxed)) return true;
    }
    return false;
}

bool Outbox::is_queue_empty() const {
    for (const auto& each : lanes_) {
        if (each->queue.front() != nullptr) return false;
    }
    return true;
}

void Outbox::wake() {
    is_asleep_.store(0);
    is_asleep_.notify_one();
}

void Outbox::fail_proxy(const std::string& message) {
    if (has_failed_.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(failure_mutex_);
    failure_ = message;
    has_failed_.store(true, std::memory_order_release);
}

}  // namespace crossdock::device_api
