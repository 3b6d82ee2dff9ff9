// SPDX-License-Identifier: Apache-2.0
// A stream of bytes from one process to another of the same host and user: a ring in a memory file that the reader has
// made. What the other process writes into it is checked, and only the two positions have a meaning.
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/cpu/memory_file.h"

namespace crossdock::network {

// Zeroed memory is an empty ring.
struct HostRing {
    static constexpr uint64_t kBytes = uint64_t{1} << 20;

    std::array<std::atomic<uint64_t>, 2> name;  // tells whether a descriptor is still that of its inbox
    // Bytes ever written, and read, the latter not up to date. Each has one writer, which trusts its own copy only.
    alignas(128) std::atomic<uint64_t> written;
    alignas(128) std::atomic<uint64_t> read;
    // The bytes begin in a page of their own on every system. Memory that is mapped is aligned to smaller pages, too.
    alignas(128) std::byte unused[(64 << 10) - 384];
    std::byte bytes[kBytes];
};
static_assert(offsetof(HostRing, bytes) == 64 << 10 && sizeof(HostRing) % (64 << 10) == 0);

// The rings of all that write to one rank. Memory is allocated as it is used.
class HostInbox {
  public:
    using Name = std::array<uint64_t, 2>;  // random
    // What writers need to find a ring, as it is sent to them.
    struct Offer {
        int64_t process;
        int64_t fd;
        uint64_t num_rings;
        Name name;
    };

    // Throws ncclSystemError.
    explicit HostInbox(uint32_t num_rings);
    Offer offer() const;
    HostRing& ring(uint32_t number) const { return reinterpret_cast<HostRing*>(mapping_.data())[number]; }

  private:
    uint32_t num_rings_;
    Name name_;
    cpu::FileDescriptor file_;
    cpu::Mapping mapping_;
};

// As readv() and writev() of a descriptor that does not block: the number of bytes, or -1 with errno EAGAIN (empty or
// full) or EPROTO (the other process has written positions that cannot be).
class HostRingReader {
  public:
    explicit HostRingReader(HostRing& ring) : ring_(&ring) {}
    bool is_empty() const { return ring_->written.load(std::memory_order_acquire) == read_; }
    ptrdiff_t read(std::span<const iovec> parts);

  private:
    HostRing* ring_;
    uint64_t read_ = 0;
    uint64_t published_ = 0;
};

class HostRingWriter {
  public:
    HostRingWriter() = default;  // full
    // Maps ring `number` of the inbox. Throws ncclSystemError if it cannot be opened, or is not what is offered.
    HostRingWriter(const HostInbox::Offer& offer, uint32_t number);
    ptrdiff_t write(std::span<const iovec> parts);

  private:
    HostRing* ring() const { return reinterpret_cast<HostRing*>(mapping_.data()); }

    cpu::Mapping mapping_;
    uint64_t written_ = 0;
    uint64_t known_read_ = 0;
};

}  // namespace crossdock::network
