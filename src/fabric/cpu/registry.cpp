// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/registry.h"

#include <atomic>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/process.h"
#include "fabric/cpu/cpu_communicator.h"

namespace crossdock::cpu {
namespace {

constexpr uintptr_t kTokenTag = uintptr_t{0xcd0c} << 48;  // beyond every user-space address
constexpr uintptr_t kTokenTagMask = uintptr_t{0xffff} << 48;

struct Entry {
    std::shared_ptr<CpuCommunicator> communicator;
    MakerProcess maker;
};

struct Registry {
    ForkSafeMutex mutex;
    std::map<ncclComm_t, Entry> communicators;
};

// Never destroyed: threads may still use communicators while the process exits.
Registry& registry() {
    static auto* instance = new Registry;
    return *instance;
}
const MadeAtLoad registry_made_at_load(registry);

}  // namespace

void* new_token() {
    static std::atomic<uintptr_t> counter{0};
    return reinterpret_cast<void*>(kTokenTag | (++counter << 4));
}

bool is_token(const void* value) { return (reinterpret_cast<uintptr_t>(value) & kTokenTagMask) == kTokenTag; }

ncclComm_t publish(std::shared_ptr<CpuCommunicator> communicator) {
    const auto handle = static_cast<ncclComm_t>(new_token());
    const std::lock_guard lock(registry().mutex);
    registry().communicators.emplace(handle, Entry{std::move(communicator), {}});
    return handle;
}

std::shared_ptr<CpuCommunicator> find_communicator(ncclComm_t handle) {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().communicators.find(handle);
    if (found == registry().communicators.end()) return nullptr;
    if (!found->second.maker.is_this()) found->second.maker.expect_this(fmt::format("comm {}", fmt::ptr(handle)));
    return found->second.communicator;
}

bool withdraw(ncclComm_t handle) {
    std::shared_ptr<CpuCommunicator> last_reference;  // dropped after the lock: freeing a communicator takes time
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().communicators.find(handle);
    if (found == registry().communicators.end()) return false;
    last_reference = std::move(found->second.communicator);
    registry().communicators.erase(found);
    return true;
}

}  // namespace crossdock::cpu
