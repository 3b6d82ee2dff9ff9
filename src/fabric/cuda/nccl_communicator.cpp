// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/nccl_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/environment_value.h"
#include "core/error.h"
#include "core/log.h"
#include "core/process.h"
#include "fabric/cuda/gin_advice.h"
#include "fabric/cuda/gin_connection.h"
#include "fabric/cuda/host_memory.h"
#include "fabric/cuda/mailbox.h"
#include "fabric/cuda/nvlink.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/cuda_runtime.h"
#include "runtime/cuda/driver_function.h"

namespace crossdock {
namespace {

// Minimum timeout of NCCL's own collective steps (connecting ranks, registering memory) and of waits for ranks in such
// a step. With many ranks per machine they take seconds, longer than a caller may want to wait for a peer's kernel, and
// they cannot be cancelled.
constexpr uint64_t kLeastSetupNs = 60'000'000'000;

Deadline deadline_after(uint64_t timeout_ns) {
    // A year: long enough for "forever", and does not overflow the clock.
    constexpr uint64_t kLongestNs = uint64_t{1'000'000'000} * 86'400 * 365;
    return std::chrono::steady_clock::now() + std::chrono::nanoseconds(std::min(timeout_ns, kLongestNs));
}

// The end of the mapping that contains `first`; 0: not known.
uintptr_t end_of_mapping(const void* first) {
    // 3.2 is the first with 64-bit sizes.
    static const auto address_range = driver_function<decltype(cuMemGetAddressRange)>("cuMemGetAddressRange", 3020);
    CUdeviceptr base = 0;
    size_t bytes = 0;
    if (address_range == nullptr ||
        address_range(&base, &bytes, static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(first))) != CUDA_SUCCESS)
        return 0;
    return static_cast<uintptr_t>(base) + bytes;
}

// An upper bound of the window's size, which NCCL does not tell. An allocator may have mapped it in several consecutive
// pieces.
size_t bytes_from(const std::byte* first, uintptr_t end_of_first_piece) {
    if (end_of_first_piece == 0) return SIZE_MAX;
    uintptr_t end = end_of_first_piece;
    for (;;) {
        const uintptr_t next = end_of_mapping(reinterpret_cast<const void*>(end));
        if (next <= end) break;
        end = next;
    }
    return end - reinterpret_cast<uintptr_t>(first);
}

class NcclCommunicator final : public Communicator {
  public:
    explicit NcclCommunicator(const NcclRank& self) : self_(self), runtime_(self.device) {}

    const BackendTraits& backend() const override { return kCudaBackend; }
    int rank() const override { return self_.rank; }
    int num_ranks() const override { return self_.num_ranks; }
    const void* identity() const override { return self_.comm; }
    int lsa_team_size() const override;
    Runtime& runtime() override { return runtime_; }
    void connect(const char* what, uint64_t timeout_ns) override { ensure_connected(what, timeout_ns); }
    void all_gather(const void* own, void* all, size_t bytes, const char* what, uint64_t timeout_ns) override;
    uint64_t setup_timeout_ns(uint64_t timeout_ns) const override { return std::max(timeout_ns, kLeastSetupNs); }
    std::unique_ptr<SymmetricMemory> allocate_symmetric(size_t bytes, uint64_t timeout_ns) override;
    WindowView window(ncclWindow_t handle) override;
    NetworkHandle network_of(const SymmetricMemory& memory) override;
    void note_signal_words(const SymmetricMemory& memory, uint64_t offset, uint64_t words) override;
    int ranks_on_device() const override;
    bool stores_lines_whole() const override;
    bool shares_host_memory() const override;

  private:
    void ensure_connected(const char* what, uint64_t timeout_ns) const;
    std::unique_ptr<Mailbox> make_mailbox(const char* what, Deadline deadline) const;
    bool wants_host_memory() const;
    void announce_host_memory() const;
    Deadline setup_deadline(uint64_t timeout_ns) const;
    bool is_linked_by_nvlink(const std::vector<GpuPlace>& places) const;
    void expect_device_api(const std::string& host_memory_problem) const;
    const GinConnection& gin(Deadline deadline) const;

    NcclRank self_;
    mutable CudaRuntime runtime_;
    mutable std::unique_ptr<Mailbox> mailbox_;  // created by ensure_connected(), like the next three
    mutable bool has_host_memory_ = false;      // symmetric memory is the host's, and all ranks are one LSA team
    mutable int ranks_on_device_ = 0;
    mutable bool stores_lines_whole_ = false;
    mutable uint64_t longest_timeout_ns_ = 0;     // given by a caller
    mutable std::unique_ptr<GinConnection> gin_;  // created when several teams are first used
    struct SeenWindow {
        WindowView view;
        uintptr_t end_of_first_piece = 0;
    };
    std::unordered_map<ncclWindow_t, SeenWindow> windows_;  // as last seen
};

void NcclCommunicator::all_gather(const void* own, void* all, size_t bytes, const char* what, uint64_t timeout_ns) {
    ensure_connected(what, timeout_ns);
    mailbox_->all_gather(own, all, bytes, what, deadline_after(timeout_ns));
}

std::unique_ptr<SymmetricMemory> NcclCommunicator::allocate_symmetric(size_t bytes, uint64_t timeout_ns) {
    constexpr const char* kWhat = "allocating symmetric memory";
    ensure_connected(kWhat, timeout_ns);
    const Deadline deadline = setup_deadline(timeout_ns);
    if (has_host_memory_) {
        const auto gather = [&](const void* own, void* all, size_t num_bytes) {
            mailbox_->all_gather(own, all, num_bytes, kWhat, deadline);
        };
        SharedHostMemory shared = share_host_memory(self_, bytes, true, gather);
        require(shared.memory != nullptr, ncclSystemError, "{} bytes of the host's memory for each of {} ranks: {}",
                bytes, self_.num_ranks, shared.problem);
        return std::move(shared.memory);
    }

    // A rank without memory tells the others, so that all fail instead of waiting for it.
    std::unique_ptr<RegisteredMemory> memory;
    ncclResult_t problem = ncclSuccess;
    std::string message;
    try {
        runtime_.expect_room(bytes);
        memory = std::make_unique<RegisteredMemory>(self_, bytes, runtime_.internal_stream());
    } catch (const Error& error) {
        problem = error.code();
        message = error.what();
    }
    const uint8_t has_memory = problem == ncclSuccess;
    std::vector<uint8_t> all_have_memory(static_cast<size_t>(self_.num_ranks));
    mailbox_->all_gather(&has_memory, all_have_memory.data(), 1, kWhat, deadline);
    require(problem == ncclSuccess, problem, "{} bytes of symmetric memory: {}", bytes, message);
    const auto poor = std::find(all_have_memory.begin(), all_have_memory.end(), 0);
    require(poor == all_have_memory.end(), ncclRemoteError, "rank {} could not allocate {} bytes of symmetric memory",
            poor - all_have_memory.begin(), bytes);
    return register_memory(std::move(memory), kWhat, deadline);
}

WindowView NcclCommunicator::window(ncclWindow_t handle) {
    // Queried every time, since a new window may get the handle of a deregistered one. NCCL looks the handle up in a
    // host table and does not dereference it. A window at the same addresses has the same peer addresses.
    void* user_pointer = nullptr;
    const ncclResult_t result = self_.nccl->ncclWinGetUserPtr(self_.comm, handle, &user_pointer);
    require(result == ncclSuccess && user_pointer != nullptr, ncclInvalidArgument,
            "window {} is not registered with this group's communicator (rank {} of {})", fmt::ptr(handle), self_.rank,
            self_.num_ranks);
    auto* local = static_cast<std::byte*>(user_pointer);
    const uintptr_t end_of_first_piece = end_of_mapping(local);
    SeenWindow& seen = windows_[handle];
    if (has_host_memory_) {
        seen.view.local = local;
        seen.view.bytes = bytes_from(local, end_of_first_piece);
        return seen.view;
    }
    if (seen.view.local != local || seen.end_of_first_piece != end_of_first_piece ||
        seen.view.peers.at(self_.rank, 0) != address_in_window(self_, handle, self_.rank)) {
        seen = {{local, bytes_from(local, end_of_first_piece), peers_of_window(self_, handle)}, end_of_first_piece};
    }
    return seen.view;
}

NetworkHandle NcclCommunicator::network_of(const SymmetricMemory& memory) {
    require(!has_host_memory_, ncclInvalidUsage,
            "the {} ranks share memory of the host, as one LSA team: for smaller teams, which use NCCL's network, set "
            "CROSSDOCK_HOST_MEMORY=0 on all ranks",
            self_.num_ranks);
    const auto& registered = dynamic_cast<const RegisteredMemory&>(memory);
    NetworkHandle network;
    network.local = memory.local;
    const GinConnection& connection = gin(setup_deadline(0));
    network.device_comm = connection.device_comm();
    network.queues = connection.queues();
    network.window = registered.window();
    return network;
}

void NcclCommunicator::note_signal_words(const SymmetricMemory& memory, uint64_t offset, uint64_t words) {
    const std::byte* const registered = dynamic_cast<const RegisteredMemory&>(memory).allocation();
    tell_plugin_signal_words(registered + offset, words * sizeof(uint64_t));
}

// Collective at the first call.
const GinConnection& NcclCommunicator::gin(Deadline deadline) const {
    if (gin_ == nullptr) gin_ = GinConnection::make(self_, deadline);
    return *gin_;
}

int NcclCommunicator::lsa_team_size() const {
    ensure_connected("asking how ranks reach each other's memory", 0);
    return has_host_memory_ ? self_.num_ranks : self_.lsa_team_size;
}

bool NcclCommunicator::shares_host_memory() const {
    ensure_connected("asking how ranks reach each other's memory", 0);
    return has_host_memory_;
}

int NcclCommunicator::ranks_on_device() const {
    ensure_connected("counting the ranks of a GPU", 0);
    return ranks_on_device_;
}

bool NcclCommunicator::stores_lines_whole() const {
    ensure_connected("asking how GPUs are linked", 0);
    return stores_lines_whole_;
}

// Uses the longest timeout that any caller of this communicator has given.
Deadline NcclCommunicator::setup_deadline(uint64_t timeout_ns) const {
    longest_timeout_ns_ = std::max(longest_timeout_ns_, timeout_ns);
    return deadline_after(setup_timeout_ns(longest_timeout_ns_));
}

void NcclCommunicator::ensure_connected(const char* what, uint64_t timeout_ns) const {
    if (mailbox_ != nullptr) return;
    const Deadline deadline = setup_deadline(timeout_ns);
    auto mailbox = make_mailbox(what, deadline);

    cudaDeviceProp properties = {};
    check_cuda(cudaGetDeviceProperties(&properties, self_.device), "cudaGetDeviceProperties");
    GpuPlace::Uuid gpu;
    static_assert(sizeof(gpu) == sizeof(properties.uuid));
    std::memcpy(gpu.data(), &properties.uuid, gpu.size());
    const GpuPlace own = GpuPlace::of(gpu);
    std::vector<GpuPlace> places(static_cast<size_t>(self_.num_ranks));
    mailbox->all_gather(&own, places.data(), sizeof(own), what, deadline);
    ranks_on_device_ = static_cast<int>(
        std::count_if(places.begin(), places.end(), [&](const GpuPlace& place) { return place.gpu == gpu; }));

    const uint8_t has_nvlink = !has_host_memory_ && is_linked_by_nvlink(places);
    std::vector<uint8_t> all_have_nvlink(places.size());
    mailbox->all_gather(&has_nvlink, all_have_nvlink.data(), 1, what, deadline);
    stores_lines_whole_ =
        std::all_of(all_have_nvlink.begin(), all_have_nvlink.end(), [](uint8_t has) { return has != 0; });
    mailbox_ = std::move(mailbox);
}

// Ranks of one host share its memory if each of them is an LSA team of its own, since that is faster than a network, or
// if NCCL has neither symmetric memory nor a network for kernels.
std::unique_ptr<Mailbox> NcclCommunicator::make_mailbox(const char* what, Deadline deadline) const {
    const size_t bytes = Mailbox::bytes(self_.num_ranks);
    const bool has_device_api = properties_of(self_).deviceApiSupport;
    NcclRank self = self_;
    std::string problem = self_.num_ranks == 1 ? "there is one rank" : "";
    if (self_.num_ranks > 1 && (self_.lsa_team_size == 1 || !has_device_api)) {
        const auto gather = [&](const void* own, void* all, size_t num_bytes) {
            gather_by_nccl(self_, runtime_, own, all, num_bytes, what, deadline);
        };
        SharedHostMemory shared = share_host_memory(self_, bytes, wants_host_memory(), gather);
        has_host_memory_ = shared.memory != nullptr;
        if (has_host_memory_) {
            if (self_.rank == 0) announce_host_memory();
            self.lsa_team_size = self_.num_ranks;
            return std::make_unique<Mailbox>(self, runtime_, std::move(shared.memory), std::nullopt);
        }
        problem = shared.problem;
        debug(fmt::format("the ranks do not share the host's memory: {}", problem));
    }
    expect_device_api(problem);
    const bool has_several_teams = self_.lsa_team_size < self_.num_ranks;
    const void* device_comm = nullptr;
    try {
        if (has_several_teams) device_comm = gin(deadline).device_comm();
    } catch (const Error& error) {
        if (problem.empty()) throw;
        fail(error.code(), "{}. The ranks do not share the host's memory, because: {}", error.what(), problem);
    }
    std::unique_ptr<RegisteredMemory> memory =
        register_memory(std::make_unique<RegisteredMemory>(self_, bytes, runtime_.internal_stream()), what, deadline);
    std::optional<NetworkHandle> network;
    if (has_several_teams) network = {.local = memory->local, .device_comm = device_comm, .window = memory->window()};
    return std::make_unique<Mailbox>(self, runtime_, std::move(memory), network);
}

// Whoever asks for smaller LSA teams wants a network between them.
bool NcclCommunicator::wants_host_memory() const {
    const auto team_size = environment_number("CROSSDOCK_LSA_TEAM_SIZE", INT32_MAX, warn);
    const bool is_split = team_size && *team_size < static_cast<uint64_t>(self_.num_ranks);
    return !is_split && environment_flag("CROSSDOCK_HOST_MEMORY", warn).value_or(true);
}

// Once per process. It is slower than NVLink, and a setting may be the reason.
void NcclCommunicator::announce_host_memory() const {
    static std::once_flag once;
    if (environment_flag("NCCL_EP_QUIET", warn).value_or(false)) return;
    std::call_once(once, [&] {
        warn(
            fmt::format("the {} ranks share the host's memory over PCIe, since NCCL gives their GPUs no access to each "
                        "other's memory. On GPUs with NVLink, look for NCCL_LSA_TEAM_SIZE, NCCL_CUMEM_ENABLE and "
                        "NCCL_WIN_ENABLE in the environment",
                        self_.num_ranks));
    });
}

// To all ranks of this rank's LSA team. places: of all ranks.
bool NcclCommunicator::is_linked_by_nvlink(const std::vector<GpuPlace>& places) const {
    const int first = self_.rank / self_.lsa_team_size * self_.lsa_team_size;
    for (int peer = first; peer < first + self_.lsa_team_size; ++peer) {
        const std::string reason =
            why_no_nvlink(places[static_cast<size_t>(self_.rank)], places[static_cast<size_t>(peer)]);
        if (reason.empty()) continue;
        debug(fmt::format("ranks {} and {}: {}: LL takes plain rows instead of LL128 rows", self_.rank, peer, reason));
        return false;
    }
    return true;
}

void NcclCommunicator::expect_device_api(const std::string& host_memory_problem) const {
    const ncclCommProperties_t properties = properties_of(self_);
    // Without a GPU-initiated network, NCCL 2.30 has no device API for several teams.
    require(properties.deviceApiSupport || properties.nLsaTeams == 1, ncclInvalidUsage,
            "the communicator's {} ranks form {} LSA teams of {} ranks, and NCCL has no network for kernels between "
            "them: {}. Ranks of one host need none if they share its memory. They do not, because: {}",
            self_.num_ranks, properties.nLsaTeams, self_.lsa_team_size, gin_advice_for(self_), host_memory_problem);
    require(properties.deviceApiSupport, ncclInvalidUsage,
            "NCCL offers no symmetric memory for this communicator of {} ranks: their GPUs must reach each other's "
            "memory (NVLink or PCIe peer access), and NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE must not forbid it. The "
            "ranks do not share the host's memory, because: {}",
            self_.num_ranks, host_memory_problem);
}

}  // namespace

std::shared_ptr<Communicator> nccl_communicator_of(ncclComm_t comm) {
    require(comm != nullptr, ncclInvalidArgument, "comm is NULL");
    // Neither CUDA nor NCCL's communicators survive a fork.
    static const MakerProcess first_user;
    first_user.expect_this(fmt::format("comm {}, or another one of NCCL,", fmt::ptr(comm)));
    const NcclApi& nccl = nccl_api();
    NcclRank self{&nccl, comm};
    const auto check = [&](ncclResult_t result) {
        require(result != ncclInvalidArgument, ncclInvalidArgument,
                "comm {} is neither a live CPU communicator nor one that NCCL accepts: {}", fmt::ptr(comm),
                nccl.ncclGetErrorString(result));
        nccl.check(result, comm, "asking the communicator, which may have failed before,");
    };
    check(nccl.ncclCommCount(comm, &self.num_ranks));
    check(nccl.ncclCommUserRank(comm, &self.rank));
    check(nccl.ncclCommCuDevice(comm, &self.device));
    // NCCL's teams all have the same size.
    self.lsa_team_size = self.num_ranks / std::max(properties_of(self).nLsaTeams, 1);
    return std::make_shared<NcclCommunicator>(self);
}

}  // namespace crossdock
