// SPDX-License-Identifier: Apache-2.0
// UCX, as little of it as frames need: contexts, workers, endpoints, active messages. Their errors become ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "network/ucx_library.h"

namespace crossdock::network {

// On networks that only copy, frames of up to so many bytes arrive in one piece and are copied once.
inline constexpr uint64_t kCopiedPayloadBytes = (uint64_t{256} << 10) - 1024;

// Which of UCX's transports a context may use.
enum class Reach : uint8_t {
    kHost,     // memory that processes of one host share
    kNetwork,  // all that leaves the host
    kChosen,   // what the user's own UCX_TLS says
};

class UcxContext {
  public:
    explicit UcxContext(Reach reach);
    ~UcxContext();
    UcxContext(const UcxContext&) = delete;
    UcxContext& operator=(const UcxContext&) = delete;
    ucp_context_h handle() const { return context_; }
    bool sends_by_reference() const { return sends_by_reference_; }

  private:
    void copy_at_once(ucp_config_t* config);
    ucp_context_h context_ = nullptr;
    bool sends_by_reference_ = true;  // the receiver reads large messages where they are
};

// One context of each kind serves all communicators of a process: making one takes milliseconds.
std::shared_ptr<UcxContext> shared_context(Reach reach);

class UcxWorker;

// The bytes behind a header, here or still at the sender. Who does not fetch or keep them lets them go.
class Payload {
  public:
    // `data` is valid while the receiver is being called.
    static Payload borrowed(const std::byte* data, uint64_t bytes) { return Payload(nullptr, nullptr, data, bytes); }
    Payload(UcxWorker* worker, void* descriptor, const std::byte* data, uint64_t bytes)
        : worker_(worker), descriptor_(descriptor), data_(data), bytes_(bytes) {}
    ~Payload();
    Payload(Payload&& other) noexcept;
    Payload& operator=(Payload&&) = delete;

    uint64_t bytes() const { return bytes_; }
    const std::byte* data() const { return data_; }  // null: fetch() brings them

    // Lets them live on after the receiver was called.
    void keep();

    // Brings bytes that are not here to `target`. `done` is called once, perhaps before this returns.
    using Done = void (*)(void* argument, ucs_status_t status);
    void fetch(std::byte* target, Done done, void* argument);

  private:
    friend class UcxWorker;
    void take();

    UcxWorker* worker_;
    void* descriptor_;  // UCX's, of bytes that can be kept or fetched
    const std::byte* data_;
    uint64_t bytes_;
    std::vector<std::byte> copy_;
    bool taken_ = false;       // kept or fetched: UCX must not let go of them
    bool* noticed_ = nullptr;  // where UCX's callback learns that, while it runs
};

class FrameReceiver {
  public:
    virtual ~FrameReceiver() = default;
    virtual void on_frame(std::span<const std::byte> header, Payload& payload) = 0;
    virtual void on_endpoint_error(uint32_t peer, const char* reason) = 0;
};

struct Send {
    using Done = void (*)(Send& send, ucs_status_t status);
    std::span<const std::byte> header;  // stays in place until it has ended
    std::span<const std::byte> bytes;
    Done done;
    UcxWorker* worker;           // for whoever sends it
    bool arrives_whole = false;  // the receiver does not have to fetch its bytes
};

class UcxWorker {
  public:
    UcxWorker(Reach reach, FrameReceiver& receiver, uint32_t num_peers);
    ~UcxWorker();
    UcxWorker(const UcxWorker&) = delete;
    UcxWorker& operator=(const UcxWorker&) = delete;

    std::vector<std::byte> address() const;
    bool sends_by_reference() const { return context_->sends_by_reference(); }
    void connect(uint32_t peer, std::span<const std::byte> address);
    // UCS_INPROGRESS: `done` will be called, once. Everything else is how it has ended, and nothing will be called.
    ucs_status_t send(uint32_t peer, Send& send);
    bool progress() { return progress_(worker_) != 0; }

    // Ends the endpoint to a peer that is lost; what is being sent there is cancelled, where UCX can do that.
    void drop(uint32_t peer);

    // Ends all endpoints. To those who are there, what is still being sent gets at most so long.
    void disconnect(const std::vector<bool>& is_there, uint64_t timeout_ns);

  private:
    struct Peer {
        UcxWorker* worker;
        uint32_t rank;
        ucp_ep_h endpoint = nullptr;
    };
    friend class Payload;
    static ucs_status_t on_message(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                   const ucp_am_recv_param_t* param);
    bool wait_for(std::vector<void*>& requests, uint64_t timeout_ns);
    static void on_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);

    Reach reach_;
    decltype(UcxLibrary::ucp_worker_progress) progress_ = ucx().ucp_worker_progress;
    decltype(UcxLibrary::ucp_am_send_nbx) send_ = ucx().ucp_am_send_nbx;
    ucp_request_param_t send_param_ = {};  // the same for all sends but for two fields
    FrameReceiver& receiver_;
    std::shared_ptr<UcxContext> context_;
    ucp_worker_h worker_ = nullptr;
    std::vector<Peer> peers_;
    std::vector<void*> dropping_;  // requests that end endpoints
    uint64_t under_way_ = 0;       // sends, fetches and kept descriptors that UCX knows of
    bool is_closed_ = false;       // all endpoints
};

}  // namespace crossdock::network
