// SPDX-License-Identifier: Apache-2.0
#include "network/ucx.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/process.h"
#include "network/ucx_address.h"
#include "network/ucx_library.h"
#include "runtime/cpu/clock.h"

namespace crossdock::network {
namespace {

constexpr unsigned kMessageId = 0;
constexpr uint64_t kCloseNs = 1'000'000'000;

void check(ucs_status_t status, const char* call) {
    require(status == UCS_OK, ncclSystemError, "UCX's {} failed: {}", call, ucx().ucs_status_string(status));
}

// UCX warns if a named transport is missing.
bool has_infiniband() { return access("/sys/class/infiniband", F_OK) == 0; }

// UCX's other transports take what strangers send (tcp), or have memory that a group may write (sysv) or anybody
// (xpmem, knem).
bool is_allowed(std::string_view transport) {
    constexpr std::string_view kNames[] = {"self", "posix", "cma", "srd"};
    constexpr std::string_view kFamilies[] = {"rc_", "ud_", "dc_", "gga_"};  // of InfiniBand, by driver
    return std::ranges::find(kNames, transport) != std::end(kNames) ||
           std::ranges::any_of(kFamilies, [&](std::string_view each) { return transport.starts_with(each); });
}

// What UCX is asked for first.
std::string wanted_transports() {
    const char* value = std::getenv("UCX_TLS");
    if (value != nullptr && *value != '\0' && std::strcmp(value, "all") != 0) return value;
    return has_infiniband() ? "ib,self" : "";
}

}  // namespace

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

UcxContext::UcxContext(const std::string& transports) {
    ucp_config_t* config = nullptr;
    check(ucx().ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
    const std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)> owner(config, ucx().ucp_config_release);
    check(ucx().ucp_config_modify(config, "TLS", transports.c_str()), "ucp_config_modify");
    // The layout of addresses that is_ucx_address() knows. Versions of UCX that know no other lack the first one.
    (void)ucx().ucp_config_modify(config, "ADDRESS_VERSION", "v1");
    (void)ucx().ucp_config_modify(config, "ADDRESS_DEBUG_INFO", "n");
    (void)ucx().ucp_config_modify(config, "UNIFIED_MODE", "n");
    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
    params.features = UCP_FEATURE_AM;
    params.mt_workers_shared = 1;
    params.name = "crossdock";
    check(ucx().ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_), "ucp_init");
}

UcxContext::~UcxContext() { ucx().ucp_cleanup(context_); }

// The transports that UCX has found, by its own account: only it knows what its variables and files mean.
std::vector<std::string> UcxContext::transports() const {
    char* text = nullptr;
    size_t bytes = 0;
    FILE* file = open_memstream(&text, &bytes);
    require(file != nullptr, ncclSystemError, "cannot list UCX's transports: {}", std::strerror(errno));
    ucx().ucp_context_print_info(context_, file);
    std::fclose(file);
    const std::unique_ptr<char, void (*)(void*)> owner(text, std::free);
    // "#  resource 2  :  md 1  dev 1  flags -- posix/memory"
    std::vector<std::string> found;
    std::istringstream lines(std::string(text, bytes));
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string hash, resource, last;
        if (!(words >> hash >> resource) || resource != "resource") continue;
        while (words >> last) {
        }
        std::string name = last.substr(0, last.find('/'));
        if (std::ranges::find(found, name) == found.end()) found.push_back(std::move(name));
    }
    return found;
}

std::shared_ptr<UcxContext> UcxContext::make() {
    std::string wanted = wanted_transports();
    if (wanted.empty()) return nullptr;
    try {
        ucx();
    } catch (const Error&) {
        // Without UCX the links carry all frames. A library that the user names must load.
        if (const char* named = std::getenv("CROSSDOCK_UCX_LIBRARY"); named != nullptr && *named != '\0') throw;
        return nullptr;
    }
    // Nothing listens before a worker is created, so UCX may be asked for anything first, and for the rest again.
    for (int turn = 0; turn < 2; ++turn) {
        std::shared_ptr<UcxContext> context(new UcxContext(wanted));
        const std::vector<std::string> found = context->transports();
        wanted.clear();
        bool reaches_others = false;
        for (const std::string& each : found) {
            if (!is_allowed(each)) continue;
            reaches_others |= each != "self";
            wanted += (wanted.empty() ? "" : ",") + each;
        }
        if (!reaches_others) return nullptr;
        if (std::ranges::all_of(found, is_allowed)) return context;
    }
    fail(ncclSystemError, "UCX was asked for {}, and would use others as well", wanted);
}

struct SharedContext {
    ForkSafeMutex mutex;
    std::weak_ptr<UcxContext> context;
};
static SharedContext& shared_context() {
    static auto* instance = new SharedContext;
    return *instance;
}
static const MadeAtLoad shared_context_made_at_load(shared_context);

std::shared_ptr<UcxContext> UcxContext::shared() {
    std::weak_ptr<UcxContext>& place = shared_context().context;
    ForkSafeMutex& mutex = shared_context().mutex;
    const auto find = [&] {
        const std::lock_guard lock(mutex);
        return place.lock();
    };
    if (auto context = find()) return context;
    // Opens UCX without the mutex, for which forks of other threads wait. If two threads do, the first context is kept.
    auto made = make();
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

UcxWorker::UcxWorker(std::shared_ptr<UcxContext> context, FrameReceiver& receiver, uint32_t num_peers)
    : receiver_(receiver), context_(std::make_unique<std::shared_ptr<UcxContext>>(std::move(context))) {
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
    check(ucx().ucp_worker_create((*context_)->handle(), &params, &worker_), "ucp_worker_create");

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
        // UCX aborts the process if a worker is destroyed with pending requests, and a dead peer's may never complete.
        // The worker is leaked and not progressed again.
        static_cast<void>(context_.release());
    }
}

std::vector<std::byte> UcxWorker::address() const {
    ucp_address_t* address = nullptr;
    size_t bytes = 0;
    check(ucx().ucp_worker_get_address(worker_, &address, &bytes), "ucp_worker_get_address");
    const auto* first = reinterpret_cast<const std::byte*>(address);
    std::vector<std::byte> copy(first, first + bytes);
    ucx().ucp_worker_release_address(worker_, address);
    require(is_ucx_address(copy), ncclSystemError,
            "the layout of its addresses is not known here, so those of other ranks cannot be checked");
    return copy;
}

bool UcxWorker::connect(uint32_t peer, std::span<const std::byte> address) {
    require(is_ucx_address(address), ncclRemoteError, "rank {} sent {} bytes that are not a UCX address", peer,
            address.size());
    ucp_ep_params_t params = {};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = on_error;
    params.err_handler.arg = &peers_[peer];
    // It may be on another RDMA network, or have left already.
    return ucx().ucp_ep_create(worker_, &params, &peers_[peer].endpoint) == UCS_OK;
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
    if (peers_[peer].endpoint == nullptr) return;
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
    (void)wait_for(requests, timeout_ns);
    ucp_request_param_t close = {};
    close.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    close.flags = UCP_EP_CLOSE_FLAG_FORCE;
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
