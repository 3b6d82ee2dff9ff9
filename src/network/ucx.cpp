// SPDX-License-Identifier: Apache-2.0
#include "network/ucx.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/process.h"
#include "network/ucx_library.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr unsigned kMessageId = 0;
constexpr uint64_t kCloseNs = 1'000'000'000;

void check(ucs_status_t status, const char* call) {
    require(status == UCS_OK, ncclSystemError, "UCX's {} failed: {}", call, ucx().ucs_status_string(status));
}

// Message suffix if /dev/shm is nearly full: how much of it a UCX worker needs. Containers have 64 MiB by default.
std::string memory_hint() {
    constexpr uint64_t kWorkerMiB = 8;
    struct statvfs memory = {};
    if (statvfs("/dev/shm", &memory) != 0) return "; there is no /dev/shm, over which ranks of one host talk";
    const uint64_t free_mib = memory.f_bavail * memory.f_frsize >> 20;
    if (free_mib >= kWorkerMiB) return {};
    return fmt::format(
        "; /dev/shm has {} of {} MiB free, and each rank of a host needs {}: make it larger (in containers "
        "--shm-size=1g, or --ipc=host)",
        free_mib, memory.f_blocks * memory.f_frsize >> 20, kWorkerMiB);
}

// UCX warns if a named transport is missing.
bool has_infiniband() { return access("/sys/class/infiniband", F_OK) == 0; }

// UCX_TLS without its TCP transport, whose listener takes what any connection sends. Empty: no transport to another
// process is left.
std::string chosen_transports() {
    const char* value = std::getenv("UCX_TLS");
    const std::string list = value == nullptr ? "" : value;
    if (list.starts_with('^')) return list + ",tcp";
    std::string rest;
    bool reaches = false;
    for (size_t begin = 0; begin <= list.size();) {
        const size_t end = std::min(list.find(',', begin), list.size());
        const std::string each = list.substr(begin, end - begin);
        begin = end + 1;
        if (each.empty() || each == "tcp") continue;
        reaches |= each != "self";
        rest += (rest.empty() ? "" : ",") + each;
    }
    return reaches ? rest : "";
}

std::string transports_of(Reach reach) {
    switch (reach) {
        case Reach::kHost:
            return "posix,sysv,cma,self";
        case Reach::kNetwork:
            return has_infiniband() ? "ib,self" : "";
        case Reach::kChosen:
            return chosen_transports();
    }
    return {};
}

}  // namespace

bool can_reach(Reach reach) {
    if (transports_of(reach).empty()) return false;
    try {
        ucx();
        return true;
    } catch (const Error&) {
        // Without UCX the links carry all frames. A library that the user names must load.
        if (const char* named = std::getenv("CROSSDOCK_UCX_LIBRARY"); named != nullptr && *named != '\0') throw;
        return false;
    }
}

const char* status_name(ucs_status_t status) {
    switch (status) {
        case UCS_ERR_CANCELED:
            return "the connection was closed";
        case UCS_ERR_CONNECTION_RESET:
            return "its process ended, or the connection was lost";
        default:
            return ucx().ucs_status_string(status);
    }
}

UcxContext::UcxContext(Reach reach) {
    ucp_config_t* config = nullptr;
    check(ucx().ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
    const std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)> owner(config, ucx().ucp_config_release);
    check(ucx().ucp_config_modify(config, "TLS", transports_of(reach).c_str()), "ucp_config_modify");
    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
    params.features = UCP_FEATURE_AM;
    params.mt_workers_shared = 1;
    params.name = "crossdock";
    check(ucx().ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_), "ucp_init");
}

UcxContext::~UcxContext() { ucx().ucp_cleanup(context_); }

struct SharedContexts {
    ForkSafeMutex mutex;
    std::weak_ptr<UcxContext> by_reach[3];
};
static SharedContexts& shared_contexts() {
    static auto* instance = new SharedContexts;
    return *instance;
}
static const MadeAtLoad shared_contexts_made_at_load(shared_contexts);

std::shared_ptr<UcxContext> shared_context(Reach reach) {
    auto& place = shared_contexts().by_reach[static_cast<size_t>(reach)];
    ForkSafeMutex& mutex = shared_contexts().mutex;
    const auto find = [&] {
        const std::lock_guard lock(mutex);
        return place.lock();
    };
    if (auto context = find()) return context;
    // Opens UCX without the mutex, for which forks of other threads wait. If two threads do, the first context is kept.
    auto made = std::make_shared<UcxContext>(reach);
    const std::lock_guard lock(mutex);
    if (auto context = place.lock()) return context;
    place = made;
    return made;
}

void UcxWorker::hold(void*) {
    was_held_ = true;
    ++under_way_;
}

void UcxWorker::let_go(void* descriptor) {
    --under_way_;
    ucx().ucp_am_data_release(worker_, descriptor);
}

void UcxWorker::fetch(void* descriptor, std::byte* target, uint64_t bytes, Done done, void* argument) {
    struct Call {
        UcxWorker* worker;
        Done done;
        void* argument;
    };
    auto* call = new Call{this, done, argument};
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                         UCP_OP_ATTR_FIELD_RECV_INFO;
    size_t length = 0;
    param.recv_info.length = &length;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    param.user_data = call;
    param.cb.recv_am = [](void* request, ucs_status_t status, size_t, void* user_data) {
        const Call finished = *static_cast<Call*>(user_data);
        delete static_cast<Call*>(user_data);
        ucx().ucp_request_free(request);
        --finished.worker->under_way_;
        finished.done(finished.argument, status);
    };
    ucs_status_ptr_t request = ucx().ucp_am_recv_data_nbx(worker_, descriptor, target, bytes, &param);
    if (request != nullptr && !UCS_PTR_IS_ERR(request)) return;  // the callback will be called
    --under_way_;
    delete call;
    done(argument, request == nullptr ? UCS_OK : UCS_PTR_STATUS(request));
}

UcxWorker::UcxWorker(Reach reach, FrameReceiver& receiver, uint32_t num_peers)
    : reach_(reach), receiver_(receiver), context_(shared_context(reach)) {
    for (uint32_t rank = 0; rank < num_peers; ++rank) peers_.push_back({this, rank});
    send_param_.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                               UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_FLAGS;
    send_param_.memory_type = UCS_MEMORY_TYPE_HOST;
    send_param_.cb.send = [](void* request, ucs_status_t status, void* user_data) {
        ucx().ucp_request_free(request);
        auto& finished = *static_cast<Send*>(user_data);
        --finished.worker->under_way_;
        finished.done(finished, status);
    };
    ucp_worker_params_t params = {};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    const ucs_status_t created = ucx().ucp_worker_create(context_->handle(), &params, &worker_);
    require(created == UCS_OK, ncclSystemError, "UCX's ucp_worker_create failed: {}{}",
            ucx().ucs_status_string(created), memory_hint());

    ucp_am_handler_param_t handler = {};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessageId;
    handler.cb = on_message;
    handler.arg = this;
    const ucs_status_t status = ucx().ucp_worker_set_am_recv_handler(worker_, &handler);
    if (status != UCS_OK) ucx().ucp_worker_destroy(worker_);
    check(status, "ucp_worker_set_am_recv_handler");
}

UcxWorker::~UcxWorker() {
    disconnect(std::vector<bool>(peers_.size(), false), 0);
    if (is_closed_ && under_way_ == 0) {
        ucx().ucp_worker_destroy(worker_);
    } else {
        // UCX aborts the process if a worker is destroyed with pending requests, and those to a dead peer in shared
        // memory never complete. The worker is leaked and not progressed again.
        new std::shared_ptr<UcxContext>(context_);
    }
}

std::vector<std::byte> UcxWorker::address() const {
    ucp_address_t* address = nullptr;
    size_t bytes = 0;
    check(ucx().ucp_worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address");
    const auto* first = reinterpret_cast<const std::byte*>(address);
    std::vector<std::byte> copy(first, first + bytes);
    ucx().ucp_worker_release_address(worker_, address);
    return copy;
}

void UcxWorker::connect(uint32_t peer, std::span<const std::byte> address) {
    ucp_ep_params_t params = {};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    // UCX has no shared memory transport with error handling; within a host, the handshake's links detect lost peers.
    params.err_mode = reach_ == Reach::kHost ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = on_error;
    params.err_handler.arg = &peers_[peer];
    const ucs_status_t status = ucx().ucp_ep_create(worker_, &params, &peers_[peer].endpoint);
    require(status == UCS_OK, ncclSystemError, "UCX cannot reach rank {}: {}", peer, ucx().ucs_status_string(status));
}

ucs_status_t UcxWorker::send(uint32_t peer, Send& send) {
    // Cancelled sends may cause further ones while endpoints are being closed.
    if (peers_[peer].endpoint == nullptr) return UCS_ERR_CANCELED;
    send.worker = this;
    send_param_.user_data = &send;
    send_param_.flags = send.arrives_whole ? UCP_AM_SEND_FLAG_EAGER : 0;
    ucs_status_ptr_t request = send_(peers_[peer].endpoint, kMessageId, send.header.data(), send.header.size(),
                                     send.bytes.data(), send.bytes.size(), &send_param_);
    if (request == nullptr) return UCS_OK;
    if (UCS_PTR_IS_ERR(request)) return UCS_PTR_STATUS(request);
    ++under_way_;
    return UCS_INPROGRESS;
}

// Returns true if all completed in time.
bool UcxWorker::wait_for(std::vector<void*>& requests, uint64_t timeout_ns) {
    const uint64_t end_ns = cpu::steady_now_ns() + timeout_ns;
    while (!requests.empty()) {
        while (ucx().ucp_request_check_status(requests.back()) == UCS_INPROGRESS) {
            if (cpu::steady_now_ns() > end_ns) return false;
            progress();
        }
        ucx().ucp_request_free(requests.back());
        requests.pop_back();
    }
    return true;
}

void UcxWorker::drop(uint32_t peer) {
    // Endpoints without error handling cannot be closed by force: sends to the peer stay pending.
    if (reach_ == Reach::kHost || peers_[peer].endpoint == nullptr) return;
    ucp_request_param_t close = {};
    close.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    close.flags = UCP_EP_CLOSE_FLAG_FORCE;
    ucs_status_ptr_t request = ucx().ucp_ep_close_nbx(std::exchange(peers_[peer].endpoint, nullptr), &close);
    if (request != nullptr && !UCS_PTR_IS_ERR(request)) dropping_.push_back(request);
}

void UcxWorker::disconnect(const std::vector<bool>& is_there, uint64_t timeout_ns) {
    if (is_closed_) return;
    std::vector<void*> requests = std::exchange(dropping_, {});
    const ucp_request_param_t flush = {};
    for (const Peer& peer : peers_) {
        if (peer.endpoint == nullptr || !is_there[peer.rank]) continue;
        ucs_status_ptr_t request = ucx().ucp_ep_flush_nbx(peer.endpoint, &flush);
        if (request != nullptr && !UCS_PTR_IS_ERR(request)) requests.push_back(request);
    }
    // Endpoints without error handling cannot be closed by force: the worker is leaked if sends are pending.
    const bool is_flushed = wait_for(requests, timeout_ns);
    const bool can_force = reach_ != Reach::kHost;
    if (!can_force && (!is_flushed || under_way_ > 0)) {
        dropping_ = std::move(requests);
        return;
    }
    ucp_request_param_t close = {};
    close.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    close.flags = can_force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    for (Peer& peer : peers_) {
        if (peer.endpoint == nullptr) continue;
        ucs_status_ptr_t request = ucx().ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &close);
        if (request != nullptr && !UCS_PTR_IS_ERR(request)) requests.push_back(request);
    }
    is_closed_ = wait_for(requests, kCloseNs);
    dropping_ = std::move(requests);  // those not complete
    // Progress delivers the callbacks of cancelled requests.
    const uint64_t end_ns = cpu::steady_now_ns() + kCloseNs;
    while (under_way_ > 0 && cpu::steady_now_ns() < end_ns) progress();
}

ucs_status_t UcxWorker::on_message(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                   const ucp_am_recv_param_t* param) {
    auto& worker = *static_cast<UcxWorker*>(self);
    const bool must_fetch = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    const bool can_stay = must_fetch || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0;
    worker.was_held_ = false;
    Payload payload(&worker, can_stay ? data : nullptr, must_fetch ? nullptr : static_cast<const std::byte*>(data),
                    bytes);
    worker.receiver_.on_frame({static_cast<const std::byte*>(header), header_bytes}, payload);
    // UCX frees a message that is not held.
    return worker.was_held_ ? UCS_INPROGRESS : UCS_OK;
}

void UcxWorker::on_error(void* peer, ucp_ep_h, ucs_status_t status) {
    const auto& failed = *static_cast<Peer*>(peer);
    failed.worker->receiver_.on_endpoint_error(failed.rank, ucx().ucs_status_string(status));
}

}  // namespace crossdock::network
