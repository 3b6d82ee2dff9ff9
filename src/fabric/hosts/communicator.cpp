// SPDX-License-Identifier: Apache-2.0
#include "fabric/hosts/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/printable.h"
#include "device/cpu/remote_memory.h"
#include "fabric/cpu/process_communicator.h"
#include "fabric/hosts/layout.h"
#include "network/mesh.h"
#include "network/progress_thread.h"
#include "network/rendezvous.h"
#include "runtime/cpu/clock.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock::hosts {
namespace {

using network::Mesh;
using network::RankInfo;

constexpr int kMostLastFrames = 1000;

const char* variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

// The time left until a deadline that several steps share.
uint64_t left_until(uint64_t deadline_ns) {
    const uint64_t now_ns = cpu::steady_now_ns();
    return deadline_ns > now_ns ? deadline_ns - now_ns : 0;
}

// The network connections of a communicator, shared by its parts.
class Wire final : public cpu::Progress {
  public:
    Wire(const network::Listener& listener, std::span<const network::RankAddress> addresses, uint32_t rank,
         uint64_t join_timeout_ns)
        : mesh_(listener, addresses, rank,
                {join_timeout_ns, cpu::network_timeout_ns(), nullptr, /*outlives_ranks=*/true}),
          progress_thread_(network::ProgressThread::add(mesh_)) {
        mesh_.add_contexts(kFirstGinContext);
    }
    Mesh& mesh() { return mesh_; }
    bool progress() override { return mesh_.progress(); }

    // Device communicators share contexts, so strong signals may cover more puts than required. Collective.
    static constexpr uint32_t kFirstGinContext = 1;
    void add_gin_contexts(int count) {
        const std::lock_guard lock(contexts_mutex_);
        if (count > num_gin_contexts_) mesh_.add_contexts(static_cast<uint32_t>(count - num_gin_contexts_));
        num_gin_contexts_ = std::max(num_gin_contexts_, count);
    }

  private:
    std::mutex contexts_mutex_;
    int num_gin_contexts_ = 0;
    Mesh mesh_;
    network::ProgressThread::Registration progress_thread_;  // ends before the mesh
};

// An exchange whose posts are notes from each rank to all others.
class NoteExchange final : public cpu::Exchange {
  public:
    explicit NoteExchange(std::shared_ptr<Wire> wire) : wire_(std::move(wire)) {}

    bool has_read(int) override { return true; }  // the mesh keeps every note
    void post(uint64_t number, const cpu::PostLabel& label, const void* chunk, size_t chunk_bytes) override {
        own_.resize(sizeof(label) + chunk_bytes);
        std::memcpy(own_.data(), &label, sizeof(label));
        if (chunk_bytes > 0) std::memcpy(own_.data() + sizeof(label), chunk, chunk_bytes);
        Mesh& mesh = wire_->mesh();
        for (uint32_t peer = 0; peer < mesh.num_ranks(); ++peer) {
            if (peer != mesh.rank()) mesh.send_note(peer, number, own_);
        }
    }

    cpu::PostSeen read(int rank, uint64_t number, cpu::PostLabel& label, void* chunk, size_t chunk_bytes) override {
        const auto peer = static_cast<uint32_t>(rank);
        std::vector<std::byte> note;
        if (peer == wire_->mesh().rank()) {
            note = own_;
        } else if (!wire_->mesh().read_note(peer, number, note)) {
            return cpu::PostSeen::kNotYet;
        }
        require(note.size() >= sizeof(label), ncclRemoteError, "rank {} sent a note of {} bytes", rank, note.size());
        std::memcpy(&label, note.data(), sizeof(label));
        // A post of another collective may be shorter; the label detects it.
        const size_t bytes = std::min(chunk_bytes, note.size() - sizeof(label));
        if (bytes > 0) std::memcpy(chunk, note.data() + sizeof(label), bytes);
        return cpu::PostSeen::kRead;
    }

    bool has_left(int rank) override { return wire_->mesh().left_in_order(static_cast<uint32_t>(rank)); }
    void report_loss(int lost) override { wire_->mesh().report_loss(static_cast<uint32_t>(lost)); }
    int reported_loss(int rank) override {
        return static_cast<int>(wire_->mesh().reported_loss(static_cast<uint32_t>(rank)));
    }

  private:
    std::shared_ptr<Wire> wire_;
    std::vector<std::byte> own_;  // the latest post
};

// Symmetric memory: mapped for ranks of this host, registered with the network for ranks on others.
class RemotePeers final : public SymmetricMemory, public cpu::RemoteMemory {
  public:
    RemotePeers(std::unique_ptr<SymmetricMemory> host_memory, std::shared_ptr<Wire> wire, const HostLayout& layout,
                uint64_t timeout_ns)
        : host_memory_(std::move(host_memory)), wire_(std::move(wire)), layout_(layout) {
        local = host_memory_->local;
        bytes = host_memory_->bytes;
        peers = host_memory_->peers;
        remote = this;
        region_ = wire_->mesh().register_memory(local, bytes, network::MemoryKind::kHost, false, timeout_ns);
    }
    ~RemotePeers() override { wire_->mesh().deregister_memory(region_); }
    RemotePeers(const RemotePeers&) = delete;
    RemotePeers& operator=(const RemotePeers&) = delete;

    bool is_remote(int peer) const override { return !layout_.is_local(peer); }
    void put(int peer, uint64_t target, const void* source, size_t num_bytes) override {
        wire_->mesh().put_copy(0, static_cast<uint32_t>(peer), {static_cast<const std::byte*>(source), num_bytes},
                               {region_, target, num_bytes});
    }
    void signal(int peer, uint64_t word, uint64_t increase) override {
        wire_->mesh().signal_copy(0, static_cast<uint32_t>(peer), {region_, word, increase, true});
    }

    void add_contexts(int count) override { wire_->add_gin_contexts(count); }
    network::Operation* start_put(int context, int peer, uint64_t target, const RemoteMemory& source, uint64_t offset,
                                  size_t num_bytes, const cpu::RemoteSignal& signal) override {
        return wire_->mesh().put(mesh_context(context), static_cast<uint32_t>(peer),
                                 {static_cast<const RemotePeers&>(source).region_, offset, num_bytes},
                                 {region_, target, num_bytes}, signal_of(signal));
    }
    network::Operation* start_get(int context, int peer, uint64_t source, const RemoteMemory& target, uint64_t offset,
                                  size_t num_bytes) override {
        return wire_->mesh().get(mesh_context(context), static_cast<uint32_t>(peer), {region_, source, num_bytes},
                                 {static_cast<const RemotePeers&>(target).region_, offset, num_bytes});
    }
    void put_value(int context, int peer, uint64_t target, uint64_t value, size_t num_bytes,
                   const cpu::RemoteSignal& signal) override {
        wire_->mesh().put_copy(mesh_context(context), static_cast<uint32_t>(peer),
                               std::as_bytes(std::span(&value, 1)).first(num_bytes), {region_, target, num_bytes});
        if (signal.memory == nullptr) return;
        // A put of another thread may come between, to which a weak signal would belong.
        cpu::RemoteSignal behind = signal;
        behind.is_strong = true;
        signal.memory->raise(context, peer, behind);
    }
    void raise(int context, int peer, const cpu::RemoteSignal& signal) const override {
        wire_->mesh().signal_copy(mesh_context(context), static_cast<uint32_t>(peer), signal_of(signal));
    }
    bool has_ended(network::Operation* operation) const override { return wire_->mesh().test(operation); }

  private:
    static uint32_t mesh_context(int context) { return Wire::kFirstGinContext + static_cast<uint32_t>(context); }
    static network::Signal signal_of(const cpu::RemoteSignal& signal) {
        if (signal.memory == nullptr) return {};
        return {static_cast<const RemotePeers*>(signal.memory)->region_, signal.word, signal.increase,
                signal.is_strong};
    }

    std::unique_ptr<SymmetricMemory> host_memory_;
    std::shared_ptr<Wire> wire_;
    HostLayout layout_;
    network::Region* region_ = nullptr;
};

class HostsCommunicator final : public cpu::ProcessCommunicator {
  public:
    // ranks_on_machine: includes ranks of other CROSSDOCK_HOSTs on this machine.
    HostsCommunicator(int rank, const HostLayout& layout, int ranks_on_machine,
                      const std::vector<cpu::ProcessIdentity>& local_processes, std::vector<std::string> host_names,
                      const std::shared_ptr<Wire>& wire)
        : ProcessCommunicator(rank, layout.num_ranks, layout.first_local, local_processes,
                              std::make_unique<NoteExchange>(wire),
                              std::make_shared<cpu::LocalExecutor>(ranks_on_machine, wire)),
          layout_(layout),
          ranks_on_machine_(ranks_on_machine),
          host_names_(std::move(host_names)),
          wire_(wire) {}

    std::unique_ptr<SymmetricMemory> allocate_symmetric(size_t bytes, uint64_t timeout_ns) override {
        const uint64_t deadline_ns = cpu::saturating_add(cpu::steady_now_ns(), timeout_ns);
        return with_remote_peers(ProcessCommunicator::allocate_symmetric(bytes, timeout_ns), deadline_ns);
    }

    int ranks_on_machine() const override { return ranks_on_machine_; }
    void stop_waiting() override { wire_->mesh().stop_waiting(); }

    std::string why_gone(int rank) override {
        if (rank == this->rank()) return {};
        std::string reason = why_ended(rank);
        // Frames that a process sent before it ended may not have been received yet.
        for (int i = 0; !reason.empty() && i < kMostLastFrames && wire_->mesh().progress(); ++i) {
        }
        if (reason.empty()) reason = wire_->mesh().why_gone(static_cast<uint32_t>(rank));
        if (!reason.empty()) reason += fmt::format(" (host {})", host_names_[static_cast<size_t>(rank)]);
        return reason;
    }

  protected:
    std::unique_ptr<SymmetricMemory> map_window(void* memory, size_t bytes, uint64_t timeout_ns) override {
        const uint64_t deadline_ns = cpu::saturating_add(cpu::steady_now_ns(), timeout_ns);
        return with_remote_peers(ProcessCommunicator::map_window(memory, bytes, timeout_ns), deadline_ns);
    }

  private:
    std::unique_ptr<SymmetricMemory> with_remote_peers(std::unique_ptr<SymmetricMemory> host_memory,
                                                       uint64_t deadline_ns) {
        if (layout_.ranks_per_host == layout_.num_ranks) return host_memory;
        return std::make_unique<RemotePeers>(std::move(host_memory), wire_, layout_, left_until(deadline_ns));
    }

    HostLayout layout_;
    int ranks_on_machine_;
    std::vector<std::string> host_names_;
    std::shared_ptr<Wire> wire_;
};

RankInfo own_info() {
    RankInfo info = {};
    gethostname(info.host_name, sizeof(info.host_name) - 1);
    const cpu::ProcessIdentity process = cpu::own_process();
    info.process = process.number;
    info.process_start = process.start;
    info.address.host = network::host_identity();
    const std::string name = variable("CROSSDOCK_HOST");
    if (!name.empty()) std::strncpy(info.host_name, name.c_str(), sizeof(info.host_name) - 1);
    return info;
}

std::string name_of(const RankInfo& info) { return printable(info.host_name, sizeof(info.host_name)); }

}  // namespace

std::shared_ptr<cpu::CpuCommunicator> join_hosts(const Launch& launch) {
    const char* interfaces = variable("CROSSDOCK_SOCKET_IFNAME");
    if (*interfaces == '\0') interfaces = variable("NCCL_SOCKET_IFNAME");
    const uint64_t deadline_ns = cpu::saturating_add(cpu::steady_now_ns(), cpu::join_timeout_ns());
    const network::JoinedRanks joined =
        network::join_ranks({launch.address, variable("CROSSDOCK_SECRET"), static_cast<uint32_t>(launch.rank),
                             static_cast<uint32_t>(launch.num_ranks), cpu::join_timeout_ns(), interfaces, launch.job},
                            own_info());
    std::vector<uint64_t> hosts;
    std::vector<std::string> names;
    std::vector<network::RankAddress> addresses;
    for (const RankInfo& info : joined.ranks) {
        hosts.push_back(info.address.host);
        names.push_back(name_of(info));
        addresses.push_back(network::read_address(&info.address));
    }
    const HostLayout layout = lay_out(hosts, names, launch.rank);
    const bool plays_hosts = *variable("CROSSDOCK_HOST") != '\0';
    require(!launch.local_ranks || plays_hosts || *launch.local_ranks == layout.ranks_per_host, ncclInvalidUsage,
            "{} says that {} ranks run on this host, but {} ranks came from host {}: they must see each other's "
            "processes (containers need the host's pid and ipc namespaces)",
            launch.launcher, launch.local_ranks.value_or(0), layout.ranks_per_host, names[layout.first_local_index()]);
    std::vector<cpu::ProcessIdentity> local_processes;
    for (int rank = layout.first_local; layout.is_local(rank); ++rank) {
        const RankInfo& info = joined.ranks[static_cast<size_t>(rank)];
        local_processes.push_back({info.process, info.process_start});
    }
    const auto wire =
        std::make_shared<Wire>(joined.listener, addresses, static_cast<uint32_t>(launch.rank), left_until(deadline_ns));
    const uint64_t machine = addresses[static_cast<size_t>(launch.rank)].network;
    const auto ranks_on_machine =
        std::count_if(addresses.begin(), addresses.end(), [&](const auto& each) { return each.network == machine; });
    return std::make_shared<HostsCommunicator>(launch.rank, layout, static_cast<int>(ranks_on_machine), local_processes,
                                               std::move(names), wire);
}

}  // namespace crossdock::hosts
