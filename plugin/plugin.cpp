// SPDX-License-Identifier: Apache-2.0
// The functions that NCCL calls, on top of network::Mesh.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "plugin/boundary.h"
#include "plugin/objects.h"
#include "plugin/settings.h"

namespace crossdock::plugin {
namespace {

constexpr const char* kName = "crossdock";
constexpr int kMaxReceives = 16;
constexpr int kAllComms = 1 << 16;
constexpr int kSpeedMbps = 100'000;
constexpr size_t kMaxBytes = size_t{1} << 40;

std::atomic<int> g_num_contexts{0};
// Not destroyed: communicators may be closed while the process exits.
std::mutex& g_comms_mutex = *new std::mutex;
std::set<const Comm*>& g_comms = *new std::set<const Comm*>;

network::Region* region_of(void* memory) { return static_cast<network::Region*>(memory); }
Comm& comm_of(void* comm) { return *static_cast<Comm*>(comm); }
Contexts& contexts_of(void* contexts) { return *static_cast<Contexts*>(contexts); }

uint32_t context_of(const Contexts& contexts, int context) {
    require(context >= 0 && static_cast<uint32_t>(context) < contexts.count, ncclInvalidArgument,
            "context {} is out of range: there are {}", context, contexts.count);
    return contexts.first + static_cast<uint32_t>(context);
}

ncclResult_t init(void** instance, uint64_t comm_id, LogFunction log) {
    return guarded([&] {
        set_log(log);
        *instance = new Instance{comm_id};
    });
}

ncclResult_t devices(int* count) {
    *count = 1;
    return ncclSuccess;
}

ncclResult_t get_properties(int, NetProperties* properties) {
    *properties = {};
    properties->name = kName;
    properties->pointer_support = kPointerHost | kPointerCuda;
    properties->speed = kSpeedMbps;
    properties->max_comms = kAllComms;
    properties->max_receives = kMaxReceives;
    properties->device_type = kDeviceTypeGinProxy;
    properties->num_devices = 1;
    properties->max_p2p_bytes = kMaxBytes;
    properties->max_collective_bytes = kMaxBytes;
    properties->max_multi_request = 1;
    properties->rail = properties->plane = -1;
    return ncclSuccess;
}

ncclResult_t listen(void*, int, void* handle, void** listener) {
    return guarded([&] {
        auto made = std::make_unique<network::Listener>(interfaces(), secret());
        std::memset(handle, 0, kHandleBytes);
        std::memcpy(handle, &made->address(), sizeof(network::RankAddress));
        *listener = made.release();
    });
}

ncclResult_t connect(void*, void* handles[], int num_ranks, int rank, void* listener, void** comm) {
    return guarded([&] {
        require(num_ranks >= 1 && rank >= 0 && rank < num_ranks, ncclInvalidArgument, "rank {} of {} ranks", rank,
                num_ranks);
        std::vector<network::RankAddress> addresses;
        for (int each = 0; each < num_ranks; ++each) addresses.push_back(network::read_address(handles[each]));
        auto made = std::make_unique<Comm>();
        made->mesh = std::make_unique<network::Mesh>(
            *static_cast<network::Listener*>(listener), addresses, static_cast<uint32_t>(rank),
            network::MeshConfig{join_timeout_ns(), progress_timeout_ns(), make_device_memory()});
        made->progress_thread = network::ProgressThread::add(*made->mesh);
        const std::lock_guard lock(g_comms_mutex);
        g_comms.insert(made.get());
        *comm = made.release();
    });
}

Contexts* make_contexts(void* comm, int count) {
    require(count >= 1, ncclInvalidArgument, "nContexts is {}, allowed: 1 and more", count);
    Comm& owner = comm_of(comm);
    const auto num_contexts = static_cast<uint32_t>(count);
    auto* contexts = new Contexts{&owner, owner.mesh->add_contexts(num_contexts), num_contexts, {}, false};
    contexts->device.type = kDeviceTypeGinProxy;
    contexts->device.needs_progress = 1;
    ++owner.num_blocks;
    ++g_num_contexts;
    return contexts;
}

ncclResult_t create_context_14(void* comm, Config14* config, void** contexts) {
    return guarded([&] { *contexts = make_contexts(comm, config->num_contexts); });
}

ncclResult_t create_context_13(void* comm, Config13* config, void** contexts, DeviceHandle** device) {
    return guarded([&] {
        Contexts* made = make_contexts(comm, config->num_contexts);
        *contexts = made;
        if (device != nullptr) *device = &made->device;
    });
}

ncclResult_t register_memory(void* comm, void* data, size_t bytes, int type, uint64_t flags, void** memory) {
    return guarded([&] {
        require(type == kPointerHost || type == kPointerCuda, ncclInvalidArgument,
                "the memory's type is {}, allowed: {} (host), {} (CUDA)", type, kPointerHost, kPointerCuda);
        const auto kind = type == kPointerCuda ? network::MemoryKind::kDevice : network::MemoryKind::kHost;
        const bool signals_only = (flags & kFlagOrdered) != 0 && (flags & kFlagNeverReset) != 0;
        *memory = comm_of(comm).mesh->register_memory(data, bytes, kind, signals_only, join_timeout_ns());
    });
}

ncclResult_t register_dma_buf_14(void* comm, void* data, size_t bytes, int type, uint64_t, int, uint64_t flags,
                                 void** memory) {
    return register_memory(comm, data, bytes, type, flags, memory);
}

ncclResult_t register_memory_13(void* comm, void* data, size_t bytes, int type, uint64_t flags, void** memory,
                                void** device_memory) {
    const ncclResult_t result = register_memory(comm, data, bytes, type, flags, memory);
    if (result == ncclSuccess && device_memory != nullptr) *device_memory = *memory;
    return result;
}

ncclResult_t register_dma_buf_13(void* comm, void* data, size_t bytes, int type, uint64_t, int, uint64_t flags,
                                 void** memory, void** device_memory) {
    return register_memory_13(comm, data, bytes, type, flags, memory, device_memory);
}

ncclResult_t deregister_memory(void* comm, void* memory) {
    return guarded([&] {
        Comm& owner = comm_of(comm);
        // NCCL's thread may not have posted all operations of kernels that have ended.
        if (owner.num_blocks > 0) owner.mesh->await_operations(region_of(memory));
        owner.mesh->deregister_memory(region_of(memory));
    });
}

ncclResult_t destroy_context(void* contexts) {
    return guarded([&] {
        --contexts_of(contexts).comm->num_blocks;
        --g_num_contexts;
        delete &contexts_of(contexts);
    });
}

ncclResult_t close_comm(void* comm) {
    return guarded([&] {
        const std::unique_ptr<Comm> closed(static_cast<Comm*>(comm));
        const std::lock_guard lock(g_comms_mutex);
        g_comms.erase(closed.get());
    });
}

ncclResult_t close_listen(void* listener) {
    return guarded([&] { delete static_cast<network::Listener*>(listener); });
}

ncclResult_t put_signal_14(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                           uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                           void* signal_memory, uint64_t value, uint32_t operation, bool is_strong, void** request) {
    return guarded([&] {
        require(signal_memory == nullptr || operation == kSignalIncrement || operation == kSignalAdd,
                ncclInvalidArgument, "the signal operation is {}, allowed: {} (increment), {} (add)", operation,
                kSignalIncrement, kSignalAdd);
        const Contexts& block = contexts_of(contexts);
        const uint64_t added = operation == kSignalIncrement ? 1 : value;
        *request = block.comm->mesh->put(context_of(block, context), rank, {region_of(source), source_offset, bytes},
                                         {region_of(target), target_offset, bytes},
                                         {region_of(signal_memory), signal_offset, added, is_strong});
    });
}

ncclResult_t put(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                 uint64_t target_offset, void* target, uint32_t rank, void** request) {
    return put_signal_14(contexts, context, source_offset, source, bytes, target_offset, target, rank, 0, nullptr, 0, 0,
                         false, request);
}

// Version 13 has strong signals only.
ncclResult_t put_signal_13(void* contexts, int context, uint64_t source_offset, void* source, size_t bytes,
                           uint64_t target_offset, void* target, uint32_t rank, uint64_t signal_offset,
                           void* signal_memory, uint64_t value, uint32_t operation, void** request) {
    return put_signal_14(contexts, context, source_offset, source, bytes, target_offset, target, rank, signal_offset,
                         signal_memory, value, operation, true, request);
}

ncclResult_t get(void* contexts, int context, uint64_t remote_offset, void* remote, size_t bytes, uint64_t local_offset,
                 void* local, uint32_t rank, void** request) {
    return guarded([&] {
        const Contexts& block = contexts_of(contexts);
        *request = block.comm->mesh->get(context_of(block, context), rank, {region_of(remote), remote_offset, bytes},
                                         {region_of(local), local_offset, bytes});
    });
}

ncclResult_t flush(void* contexts, int context, void*, uint32_t rank, void** request) {
    return guarded([&] {
        const Contexts& block = contexts_of(contexts);
        *request = block.comm->mesh->flush(context_of(block, context), rank);
    });
}

ncclResult_t test(void* comm, void* request, int* done) {
    return guarded([&] { *done = comm_of(comm).mesh->test(static_cast<network::Operation*>(request)) ? 1 : 0; });
}

ncclResult_t progress(void* contexts) {
    return guarded([&] {
        Contexts& block = contexts_of(contexts);
        block.comm->mesh->progress();
        // NCCL calls queryLastError, which has no message, so report it here.
        if (!block.comm->mesh->has_failed() || block.told_failure) return;
        block.told_failure = true;
        block.comm->mesh->check();
    });
}

ncclResult_t query_last_error(void* contexts, bool* has_error) {
    return guarded([&] { *has_error = contexts_of(contexts).comm->mesh->has_failed(); });
}

ncclResult_t finalize(void* instance) {
    delete static_cast<Instance*>(instance);
    return ncclSuccess;
}

}  // namespace
}  // namespace crossdock::plugin

using namespace crossdock::plugin;

extern "C" {

const Rma14 ncclRmaPlugin_v14 = {
    kName,
    init,
    devices,
    get_properties,
    listen,
    connect,
    create_context_14,
    register_memory,
    register_dma_buf_14,
    deregister_memory,
    destroy_context,
    close_comm,
    close_listen,
    put,
    put_signal_14,
    get,
    flush,
    test,
    progress,
    query_last_error,
    finalize,
};

const Rma13 ncclRmaPlugin_v13 = {
    kName,
    init,
    devices,
    get_properties,
    listen,
    connect,
    create_context_13,
    register_memory_13,
    register_dma_buf_13,
    deregister_memory,
    destroy_context,
    close_comm,
    close_listen,
    put,
    put_signal_13,
    get,
    flush,
    test,
    progress,
    query_last_error,
    finalize,
};

int crossdockRmaPluginContexts(void) { return g_num_contexts.load(); }
void crossdockRmaPluginLastError(char* message, size_t bytes) { copy_last_warning(message, bytes); }
int crossdockRmaPluginSignalWords(const void* words, size_t bytes) {
    const std::lock_guard lock(g_comms_mutex);
    const auto keeps = [&](const Comm* comm) { return comm->mesh->keep_words(words, bytes); };
    return static_cast<int>(std::count_if(g_comms.begin(), g_comms.end(), keeps));
}

}  // extern "C"
