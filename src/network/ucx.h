// SPDX-License-Identifier: Apache-2.0
// The part of UCX that frames need: contexts, workers, endpoints, active messages. Its errors become exceptions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "network/payload.h"
#include "network/ucx_library.h"

namespace crossdock::network {

// Name of a status, for messages. Loads UCX only for statuses that are not known here.
const char* status_name(ucs_status_t status);

// Uses no transport but those whose memory and connections only ranks reach: RDMA, and, if UCX_TLS names them, UCX's
// shared memory with mode 0600. One context serves all communicators of a process: creating one takes milliseconds.
class UcxContext {
  public:
    ~UcxContext();
    UcxContext(const UcxContext&) = delete;
    UcxContext& operator=(const UcxContext&) = delete;
    // Null if there is no UCX, or it has no such transport on this machine. Throws ncclInvalidUsage if
    // CROSSDOCK_UCX_LIBRARY names a file that is no UCX, ncclSystemError if UCX fails.
    static std::shared_ptr<UcxContext> shared();

    ucp_context_h handle() const { return context_; }

  private:
    explicit UcxContext(const std::string& transports);
    static std::shared_ptr<UcxContext> make();
    std::vector<std::string> transports() const;

    ucp_context_h context_ = nullptr;
};

class UcxWorker final : private PayloadSource {
  public:
    // Throws ncclSystemError.
    UcxWorker(std::shared_ptr<UcxContext> context, FrameReceiver& receiver, uint32_t num_peers);
    ~UcxWorker();
    UcxWorker(const UcxWorker&) = delete;
    UcxWorker& operator=(const UcxWorker&) = delete;

    // Throws ncclSystemError if its layout is not known here.
    std::vector<std::byte> address() const;
    // Returns false if no transport reaches the peer. Throws ncclRemoteError that names it if it sent no address.
    bool connect(uint32_t peer, std::span<const std::byte> address);
    // Returns UCS_INPROGRESS if `done` will be called, once; otherwise the final status, and `done` is not called.
    ucs_status_t send(uint32_t peer, Send& send);
    bool progress() { return progress_(worker_) != 0; }

    // Closes the endpoint to a lost peer, and cancels sends to it.
    void drop(uint32_t peer);

    // Closes all endpoints. Pending sends to peers that are alive get at most timeout_ns.
    void disconnect(const std::vector<bool>& is_there, uint64_t timeout_ns);

  private:
    struct Peer {
        UcxWorker* worker;
        uint32_t rank;
        ucp_ep_h endpoint = nullptr;
    };
    void hold(void* descriptor) override;
    void fetch(void* descriptor, std::byte* target, uint64_t bytes, Done done, void* argument) override;
    void let_go(void* descriptor) override;
    static ucs_status_t on_message(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                   const ucp_am_recv_param_t* param);
    bool wait_for(std::vector<void*>& requests, uint64_t timeout_ns);
    static void on_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);

    decltype(UcxLibrary::ucp_worker_progress) progress_ = ucx().ucp_worker_progress;
    decltype(UcxLibrary::ucp_am_send_nbx) send_ = ucx().ucp_am_send_nbx;
    ucp_request_param_t send_param_ = {};  // common to all sends except for two fields
    FrameReceiver& receiver_;
    // On the heap, where it stays with a worker that cannot be destroyed.
    std::unique_ptr<std::shared_ptr<UcxContext>> context_;
    ucp_worker_h worker_ = nullptr;
    std::vector<Peer> peers_;
    std::vector<void*> dropping_;  // requests that close endpoints
    bool was_held_ = false;        // the current message
    uint64_t under_way_ = 0;       // pending sends, fetches and held descriptors
    bool is_closed_ = false;       // all endpoints
};

}  // namespace crossdock::network
