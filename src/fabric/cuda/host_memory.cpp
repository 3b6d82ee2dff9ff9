// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/host_memory.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "runtime/cpu/machine_memory.h"
#include "runtime/cpu/memory_file.h"
#include "runtime/cuda/cuda_check.h"

namespace crossdock {
namespace {

constexpr size_t kPageBytes = 64 << 10;  // of every system
constexpr size_t whole_pages(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// Random, at the end of the file. On another host, the same process and descriptor numbers may name another file.
using Name = std::array<uint64_t, 2>;

// What a rank tells the others, in two steps. Of one size in both, and with the step, since ranks may be out of step
// after an exchange that failed.
struct Message {
    uint64_t step = 0;
    int64_t process = 0;
    int64_t fd = -1;  // -1: this rank has no file
    Name name{};
    uint64_t agrees = 0;  // first that memory is wanted, then that it is mapped
};

// The file has a piece for each rank, and its name.
struct FileLayout {
    size_t piece_bytes;
    size_t name_at;
    size_t bytes;
    FileLayout(size_t wanted_bytes, int num_ranks)
        : piece_bytes(whole_pages(wanted_bytes)),
          name_at(piece_bytes * static_cast<size_t>(num_ranks)),
          bytes(name_at + kPageBytes) {}
};

// Tells the others where it is.
cpu::FileDescriptor make_file(const FileLayout& layout, Message& message) {
    require(layout.bytes <= cpu::machine_memory(), ncclSystemError,
            "{} bytes of the host's memory are needed, and this machine or container has {}: lower "
            "max_dispatch_tokens_per_rank or max_token_bytes",
            layout.bytes, cpu::machine_memory());
    cpu::FileDescriptor file = cpu::make_memory_file(layout.bytes);
    require(getrandom(message.name.data(), sizeof(Name), 0) == sizeof(Name), ncclSystemError,
            "the system gives no random bytes: {}", std::strerror(errno));
    const cpu::Mapping mapping(file.get(), kPageBytes, layout.name_at);
    std::memcpy(mapping.data(), message.name.data(), sizeof(Name));
    message.process = getpid();
    message.fd = file.get();
    return file;
}

class HostMemory final : public SymmetricMemory {
  public:
    HostMemory(const NcclRank& self, const FileLayout& layout, size_t num_bytes, const Message& offer)
        : device_(self.device) {
        const cpu::FileDescriptor file = cpu::open_of_process(offer.process, static_cast<int>(offer.fd));
        mapping_ = cpu::Mapping(file.get(), layout.bytes);
        require(std::memcmp(mapping_.data() + layout.name_at, offer.name.data(), sizeof(Name)) == 0, ncclSystemError,
                "process {} of this host is not that of rank 0", offer.process);
        (void)madvise(mapping_.data(), layout.bytes, MADV_DONTFORK);  // a child would keep the memory
        DeviceGuard guard(device_);
        check_cuda(cudaHostRegister(mapping_.data(), layout.name_at, cudaHostRegisterMapped), "cudaHostRegister");
        is_registered_ = true;
        void* address = nullptr;
        const cudaError_t result = cudaHostGetDevicePointer(&address, mapping_.data(), 0);
        if (result != cudaSuccess) release();
        check_cuda(result, "cudaHostGetDevicePointer");
        peers.base = static_cast<std::byte*>(address);
        peers.stride = layout.piece_bytes;
        local = peers.at(static_cast<uint32_t>(self.rank), 0);
        bytes = num_bytes;
    }
    ~HostMemory() override { release(); }

  private:
    void release() noexcept {
        if (!is_registered_) return;
        try {
            DeviceGuard guard(device_);
            check_cuda(cudaHostUnregister(mapping_.data()), "cudaHostUnregister");
        } catch (const std::exception& error) {
            debug(error.what());
        }
        is_registered_ = false;
    }

    int device_;
    cpu::Mapping mapping_;
    bool is_registered_ = false;
};

// NCCL's kernel reads whole words.
constexpr size_t kGatheredBytes = 16;

// memory: on the device, for the own bytes, a multiple of kGatheredBytes, and then all ranks' bytes.
std::vector<std::byte> gather_on_device(const NcclRank& self, const std::vector<std::byte>& own, std::byte* memory,
                                        Deadline deadline) {
    DeviceGuard guard(self.device);
    const size_t bytes = own.size();
    std::vector<std::byte> all(bytes * static_cast<size_t>(self.num_ranks));
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaMemcpyAsync(memory, own.data(), bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    ncclResult_t result = self.nccl->ncclAllGather(memory, memory + bytes, bytes, ncclUint8, self.comm, stream);
    // A communicator with config.blocking = 0. The caller does not wait beyond the deadline.
    while (result == ncclInProgress && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        self.nccl->check(self.nccl->ncclCommGetAsyncError(self.comm, &result), self.comm, "ncclCommGetAsyncError");
    }
    self.nccl->check(result, self.comm, "ncclAllGather");
    check_cuda(cudaMemcpyAsync(all.data(), memory + bytes, all.size(), cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
    return all;
}

std::vector<Message> exchange(const NcclRank& self, const Message& own, const GatherHostBytes& gather) {
    std::vector<Message> all(static_cast<size_t>(self.num_ranks));
    gather(&own, all.data(), sizeof(Message));
    const auto other = std::find_if(all.begin(), all.end(), [&](const Message& one) { return one.step != own.step; });
    require(other == all.end(), ncclRemoteError,
            "rank {} is in another step of sharing the host's memory, after an attempt that failed: abort the "
            "communicator",
            other - all.begin());
    return all;
}

// The first rank that does not agree; nullopt: all do.
std::optional<ptrdiff_t> find_unwilling(const std::vector<Message>& messages) {
    const auto found =
        std::find_if(messages.begin(), messages.end(), [](const Message& one) { return one.agrees == 0; });
    return found == messages.end() ? std::nullopt : std::optional(found - messages.begin());
}

}  // namespace

SharedHostMemory share_host_memory(const NcclRank& self, size_t bytes, bool is_wanted, const GatherHostBytes& gather) {
    const FileLayout layout(bytes, self.num_ranks);
    SharedHostMemory shared;
    Message own{.step = 1, .agrees = is_wanted};
    cpu::FileDescriptor file;  // rank 0's, until all have opened it
    try {
        if (self.rank == 0 && is_wanted) file = make_file(layout, own);
    } catch (const std::exception& error) {
        shared.problem = error.what();
    }
    const std::vector<Message> offers = exchange(self, own, gather);
    if (const auto rank = find_unwilling(offers)) {
        shared.problem =
            fmt::format("rank {} does not want it (CROSSDOCK_HOST_MEMORY, CROSSDOCK_LSA_TEAM_SIZE)", *rank);
        return shared;
    }
    if (offers[0].fd < 0) {
        if (shared.problem.empty()) shared.problem = "rank 0 could not make the file";
        return shared;
    }

    try {
        shared.memory = std::make_unique<HostMemory>(self, layout, bytes, offers[0]);
    } catch (const std::exception& error) {
        shared.problem = error.what();
    }
    try {
        const auto rank = find_unwilling(exchange(self, {.step = 2, .agrees = shared.memory != nullptr}, gather));
        if (!rank) return shared;
        shared.memory = nullptr;
        if (shared.problem.empty()) shared.problem = fmt::format("rank {} could not map the file of rank 0", *rank);
        return shared;
    } catch (...) {
        // NCCL's kernel may wait on the GPU for ever, and to unregister memory may wait for kernels.
        (void)shared.memory.release();
        throw;
    }
}

void gather_by_nccl(const NcclRank& self, CudaRuntime& runtime, const void* own, void* all, size_t bytes,
                    const char* what, Deadline deadline) {
    const size_t padded_bytes = (bytes + kGatheredBytes - 1) / kGatheredBytes * kGatheredBytes;
    std::vector<std::byte> padded(padded_bytes);
    std::memcpy(padded.data(), own, bytes);
    // After a failure it stays, because NCCL may still use it.
    auto* memory = static_cast<std::byte*>(runtime.allocate(padded_bytes * (static_cast<size_t>(self.num_ranks) + 1)));
    const std::vector<std::byte> gathered = run_bounded(
        [self, memory, deadline, padded = std::move(padded)] {
            return gather_on_device(self, padded, memory, deadline);
        },
        deadline,
        fmt::format("{}: some rank did not come to NCCL's all-gather in time; its kernel waits on the GPU until the "
                    "communicator is aborted",
                    what));
    runtime.free(memory);
    for (size_t rank = 0; rank < static_cast<size_t>(self.num_ranks); ++rank)
        std::memcpy(static_cast<std::byte*>(all) + rank * bytes, gathered.data() + rank * padded_bytes, bytes);
}

}  // namespace crossdock
