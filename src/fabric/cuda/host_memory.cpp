// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/host_memory.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
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

struct Offer {
    int64_t process = 0;
    int64_t fd = -1;  // -1: this rank has no file
    Name name{};
    uint64_t is_wanted = 0;
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

// Rank 0's, while the others open it.
struct NewFile {
    cpu::FileDescriptor descriptor;
    Offer offer;
};

NewFile make_file(const FileLayout& layout) {
    require(layout.bytes <= cpu::machine_memory(), ncclSystemError,
            "{} bytes of the host's memory are needed, and this machine or container has {}", layout.bytes,
            cpu::machine_memory());
    NewFile file{cpu::make_memory_file(layout.bytes), {}};
    file.offer.process = getpid();
    file.offer.fd = file.descriptor.get();
    require(getrandom(file.offer.name.data(), sizeof(Name), 0) == sizeof(Name), ncclSystemError,
            "the system gives no random bytes: {}", std::strerror(errno));
    const cpu::Mapping mapping(file.descriptor.get(), kPageBytes, layout.name_at);
    std::memcpy(mapping.data(), file.offer.name.data(), sizeof(Name));
    return file;
}

class HostMemory final : public SymmetricMemory {
  public:
    HostMemory(const NcclRank& self, const FileLayout& layout, size_t num_bytes, const Offer& offer)
        : device_(self.device) {
        const cpu::FileDescriptor file = cpu::open_of_process(offer.process, static_cast<int>(offer.fd));
        mapping_ = cpu::Mapping(file.get(), layout.bytes);
        require(std::memcmp(mapping_.data() + layout.name_at, offer.name.data(), sizeof(Name)) == 0, ncclSystemError,
                "process {} of this host is not that of rank 0", offer.process);
        DeviceGuard guard(device_);
        check_cuda(cudaHostRegister(mapping_.data(), layout.name_at, cudaHostRegisterPortable | cudaHostRegisterMapped),
                   "cudaHostRegister");
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

// NCCL's all-gather of bytes in device memory, a multiple of kGatheredBytes: NCCL's kernel reads whole words. On
// failure the memory stays: NCCL may still use it.
constexpr size_t kGatheredBytes = 16;
std::vector<std::byte> gather_on_device(const NcclRank& self, const std::vector<std::byte>& own) {
    DeviceGuard guard(self.device);
    const size_t bytes = own.size();
    std::vector<std::byte> all(bytes * static_cast<size_t>(self.num_ranks));
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes + all.size()), "cudaMalloc");
    auto* gathered = static_cast<std::byte*>(memory) + bytes;
    check_cuda(cudaMemcpyAsync(memory, own.data(), bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    ncclResult_t result = self.nccl->ncclAllGather(memory, gathered, bytes, ncclUint8, self.comm, stream);
    while (result == ncclInProgress) {  // a communicator with config.blocking = 0
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        self.nccl->check(self.nccl->ncclCommGetAsyncError(self.comm, &result), self.comm, "ncclCommGetAsyncError");
    }
    self.nccl->check(result, self.comm, "ncclAllGather");
    check_cuda(cudaMemcpyAsync(all.data(), gathered, all.size(), cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_cuda(cudaFree(memory), "cudaFree");
    check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
    return all;
}

}  // namespace

SharedHostMemory share_host_memory(const NcclRank& self, size_t bytes, bool is_wanted, const GatherHostBytes& gather) {
    const FileLayout layout(bytes, self.num_ranks);
    SharedHostMemory shared;
    NewFile file;
    try {
        if (self.rank == 0 && is_wanted) file = make_file(layout);
    } catch (const Error& error) {
        shared.problem = error.what();
    }
    file.offer.is_wanted = is_wanted;
    std::vector<Offer> offers(static_cast<size_t>(self.num_ranks));
    gather(&file.offer, offers.data(), sizeof(Offer));
    const auto unwilling =
        std::find_if(offers.begin(), offers.end(), [](const Offer& offer) { return offer.is_wanted == 0; });
    if (unwilling != offers.end()) {
        shared.problem = fmt::format("CROSSDOCK_HOST_MEMORY is 0 on rank {}", unwilling - offers.begin());
        return shared;
    }
    if (offers[0].fd < 0) {
        if (shared.problem.empty()) shared.problem = "rank 0 could not make it";
        return shared;
    }

    try {
        shared.memory = std::make_unique<HostMemory>(self, layout, bytes, offers[0]);
    } catch (const Error& error) {
        shared.problem = error.what();
    }
    // Rank 0 keeps its descriptor until all have opened it.
    const uint8_t is_mapped = shared.memory != nullptr;
    std::vector<uint8_t> outcomes(offers.size());
    gather(&is_mapped, outcomes.data(), 1);
    const auto poor = std::find(outcomes.begin(), outcomes.end(), 0);
    if (poor == outcomes.end()) return shared;
    shared.memory = nullptr;
    if (shared.problem.empty())
        shared.problem = fmt::format("rank {} could not map memory of rank 0", poor - outcomes.begin());
    return shared;
}

void gather_by_nccl(const NcclRank& self, const void* own, void* all, size_t bytes, const char* what,
                    Deadline deadline) {
    const size_t padded_bytes = (bytes + kGatheredBytes - 1) / kGatheredBytes * kGatheredBytes;
    std::vector<std::byte> padded(padded_bytes);
    std::memcpy(padded.data(), own, bytes);
    const std::vector<std::byte> gathered =
        run_bounded([self, padded = std::move(padded)] { return gather_on_device(self, padded); }, deadline,
                    fmt::format("{}: some rank did not come to NCCL's all-gather in time", what));
    for (size_t rank = 0; rank < static_cast<size_t>(self.num_ranks); ++rank)
        std::memcpy(static_cast<std::byte*>(all) + rank * bytes, gathered.data() + rank * padded_bytes, bytes);
}

}  // namespace crossdock
