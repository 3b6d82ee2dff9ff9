// SPDX-License-Identifier: Apache-2.0
#include "cpu_rank.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <future>

#include "api/simulation.h"

namespace crossdock::testing {
namespace {

class ThreadBeside final : public Beside {
  public:
    explicit ThreadBeside(std::function<void()> body) : done_(std::async(std::launch::async, std::move(body))) {}
    void join() override {
        if (done_.valid()) done_.get();
    }

  private:
    std::future<void> done_;  // whose destructor waits
};

class SimulatedBeside final : public Beside {
  public:
    SimulatedBeside(ncclComm_t comm, std::function<void()> body) : task_(comm, std::move(body)) {}
    void join() override { task_.join(); }

  private:
    SimulatedTask task_;
};

}  // namespace

std::string free_address() {
    // Below the kernel's ephemeral port range.
    constexpr int kFirst = 10'000;
    constexpr int kPorts = 20'000;
    static int next = getpid() * 61;
    for (int attempt = 0; attempt < 100; ++attempt) {
        const int port = kFirst + ++next % kPorts;
        const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(static_cast<uint16_t>(port));
        const bool is_free = bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
        close(socket);
        if (is_free) return fmt::format("127.0.0.1:{}", port);
    }
    throw std::runtime_error("no free port");
}

CommunicatorSets::~CommunicatorSets() {
    for (const std::vector<ncclComm_t>& set : sets_) {
        for (const ncclComm_t comm : set) crossdockCommDestroy(comm);
    }
}

ncclComm_t CommunicatorSets::get(size_t index, int rank) {
    const std::lock_guard lock(mutex_);
    while (sets_.size() <= index) {
        std::vector<ncclComm_t> comms(num_ranks_);
        if (crossdockCommInitAll(comms.data(), num_ranks_) != ncclSuccess)
            throw std::runtime_error(crossdockGetLastError());
        sets_.push_back(std::move(comms));
    }
    return sets_[index][rank];
}

CpuRank::~CpuRank() {
    for (const ncclComm_t comm : kept_) crossdockCommDestroy(comm);
}

void* CpuRank::allocate(size_t bytes) {
    // An allocation of its own for each buffer, so that AddressSanitizer sees what runs over; only the start is rounded
    // up.
    constexpr size_t kAlignment = 256;
    auto memory = std::make_unique_for_overwrite<std::byte[]>(bytes + kAlignment);
    void* aligned = memory.get();
    size_t space = bytes + kAlignment;
    std::align(kAlignment, bytes, aligned, space);
    allocations_[aligned] = std::move(memory);
    return aligned;
}

void CpuRank::deallocate(void* memory) { allocations_.erase(memory); }

void CpuRank::copy_to_device(void* target, const void* source, size_t bytes, cudaStream_t) {
    if (bytes != 0) std::memcpy(target, source, bytes);
}

void CpuRank::copy_to_host(void* target, const void* source, size_t bytes, cudaStream_t) {
    if (bytes != 0) std::memcpy(target, source, bytes);
}

Window CpuRank::make_window(size_t bytes) {
    Window window;
    window.bytes = bytes;
    void* memory = nullptr;
    RANK_OK(*this, crossdockMemAlloc(&memory, bytes));
    window.memory = static_cast<std::byte*>(memory);
    RANK_OK(*this, crossdockCommWindowRegister(comm(), memory, bytes, &window.handle, 0));
    return window;
}

void CpuRank::destroy_window(const Window& window) {
    // Without throwing: destructors come here.
    const bool gone = crossdockCommWindowDeregister(comm(), window.handle) == ncclSuccess &&
                      crossdockMemFree(window.memory) == ncclSuccess;
    RANK_CHECK(*this, gone, "{}", crossdockGetLastError());
}

void CpuRank::barrier() { RANK_OK(*this, crossdockCommBarrier(comm())); }

void CpuRank::all_gather(const void* own, void* all, size_t bytes) {
    RANK_OK(*this, crossdockCommAllGather(comm(), own, all, bytes));
}

std::unique_ptr<Beside> CpuRank::run_beside(std::function<void()> body) {
    if (is_simulated()) return std::make_unique<SimulatedBeside>(comm(), std::move(body));
    return std::make_unique<ThreadBeside>(std::move(body));
}

void CpuRank::pause() {
    if (!is_simulated()) return RankContext::pause();
    SimulatedTask::pause(comm());
}

void CpuRank::yield() {
    if (!is_simulated()) return RankContext::yield();
    SimulatedTask::yield(comm());
}

ncclComm_t CpuRank::make_communicator() {
    if (is_simulated()) throw std::logic_error("the simulation has one communicator");
    return make_comm_(*this, num_made_++);
}

ncclComm_t CpuRank::keep(ncclComm_t comm) {
    kept_.push_back(comm);
    return comm;
}

}  // namespace crossdock::testing
