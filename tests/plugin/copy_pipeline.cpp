// SPDX-License-Identifier: Apache-2.0
#include "copy_pipeline.h"

#include <arpa/inet.h>
#include <cuda_runtime.h>
#include <fmt/format.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

namespace crossdock::plugin_test {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{256} << 10;
constexpr uint32_t kPieces = 8;  // under way at an end

void check(cudaError_t result, const char* call) {
    if (result != cudaSuccess) throw std::runtime_error(fmt::format("{} failed: {}", call, cudaGetErrorString(result)));
}

void check(bool holds, const char* call) {
    if (!holds) throw std::runtime_error(fmt::format("{} failed: {}", call, std::strerror(errno)));
}

class Socket {
  public:
    explicit Socket(int descriptor) : descriptor_(descriptor) { check(descriptor >= 0, "a socket"); }
    Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
    ~Socket() {
        if (descriptor_ >= 0) close(descriptor_);
    }
    Socket(const Socket&) = delete;
    Socket& operator=(const Socket&) = delete;
    Socket& operator=(Socket&&) = delete;
    int get() const { return descriptor_; }

  private:
    int descriptor_;
};

std::pair<Socket, Socket> connect_loopback() {
    const Socket listener(socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address);
    check(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), bytes) == 0, "bind");
    check(listen(listener.get(), 1) == 0, "listen");
    check(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &bytes) == 0, "getsockname");
    Socket sender(socket(AF_INET, SOCK_STREAM, 0));
    check(connect(sender.get(), reinterpret_cast<sockaddr*>(&address), bytes) == 0, "connect");
    Socket receiver(accept(listener.get(), nullptr, nullptr));
    return {std::move(sender), std::move(receiver)};
}

// A stream and pinned pieces, each with an event behind its latest copy.
class Pieces {
  public:
    Pieces() {
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
        check(cudaHostAlloc(&memory_, kPieces * kPieceBytes, cudaHostAllocDefault), "cudaHostAlloc");
        for (cudaEvent_t& event : events_)
            check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    }
    ~Pieces() {
        cudaStreamSynchronize(stream_);
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
        cudaFreeHost(memory_);
        cudaStreamDestroy(stream_);
    }
    Pieces(const Pieces&) = delete;
    Pieces& operator=(const Pieces&) = delete;

    std::byte* at(uint64_t piece) const { return static_cast<std::byte*>(memory_) + piece % kPieces * kPieceBytes; }
    void copy(uint64_t piece, void* target, const void* source, uint64_t bytes) {
        check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
        check(cudaEventRecord(events_.at(piece % kPieces), stream_), "cudaEventRecord");
    }
    void wait(uint64_t piece) { check(cudaEventSynchronize(events_.at(piece % kPieces)), "cudaEventSynchronize"); }

  private:
    cudaStream_t stream_ = nullptr;
    void* memory_ = nullptr;
    std::array<cudaEvent_t, kPieces> events_{};
};

class DeviceBytes {
  public:
    explicit DeviceBytes(uint64_t bytes) { check(cudaMalloc(&memory_, bytes), "cudaMalloc"); }
    ~DeviceBytes() { cudaFree(memory_); }
    DeviceBytes(const DeviceBytes&) = delete;
    DeviceBytes& operator=(const DeviceBytes&) = delete;
    std::byte* get() const { return static_cast<std::byte*>(memory_); }

  private:
    void* memory_ = nullptr;
};

// act(piece, offset, size) for all pieces of all rounds.
template <typename Act>
void for_each_piece(uint64_t bytes, uint32_t rounds, Act act) {
    uint64_t piece = 0;
    for (uint32_t round = 0; round < rounds; ++round) {
        for (uint64_t at = 0; at < bytes; at += kPieceBytes) act(piece++, at, std::min(kPieceBytes, bytes - at));
    }
}

}  // namespace

double pipelined_copies_ns(uint64_t bytes, uint32_t rounds) {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const auto [sender, receiver] = connect_loopback();
    const DeviceBytes source(bytes), target(bytes);
    Pieces out, in;
    const auto start = std::chrono::steady_clock::now();
    // Asks for copies some pieces ahead of those that it sends.
    std::thread sending([&, socket = sender.get()] {
        cudaSetDevice(device);
        uint64_t sent = 0;
        const uint64_t a_round = (bytes + kPieceBytes - 1) / kPieceBytes;
        const auto send_next = [&] {
            const uint64_t size = std::min(kPieceBytes, bytes - sent % a_round * kPieceBytes);
            out.wait(sent);
            for (uint64_t done = 0; done < size;) {
                const ssize_t some = send(socket, out.at(sent) + done, size - done, MSG_NOSIGNAL);
                check(some > 0, "send");
                done += static_cast<uint64_t>(some);
            }
            ++sent;
        };
        for_each_piece(bytes, rounds, [&](uint64_t piece, uint64_t at, uint64_t size) {
            if (piece - sent == kPieces) send_next();
            out.copy(piece, out.at(piece), source.get() + at, size);
        });
        while (sent < a_round * rounds) send_next();
    });
    for_each_piece(bytes, rounds, [&](uint64_t piece, uint64_t at, uint64_t size) {
        if (piece >= kPieces) in.wait(piece);
        for (uint64_t done = 0; done < size;) {
            const ssize_t some = recv(receiver.get(), in.at(piece) + done, size - done, 0);
            check(some > 0, "recv");
            done += static_cast<uint64_t>(some);
        }
        in.copy(piece, target.get() + at, in.at(piece), size);
    });
    sending.join();
    for (uint64_t piece = 0; piece < kPieces; ++piece) in.wait(piece);
    const std::chrono::duration<double, std::nano> ns = std::chrono::steady_clock::now() - start;
    return ns.count();
}

}  // namespace crossdock::plugin_test
