// SPDX-License-Identifier: Apache-2.0
#include "network/host_ring.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "core/error.h"
#include "network/crypto.h"

namespace crossdock::network {
namespace {

static_assert(std::is_standard_layout_v<HostRing> && std::atomic<uint64_t>::is_always_lock_free);

// The other process sees a position after so many bytes, and copies them while this one copies the next ones.
constexpr uint64_t kStepBytes = uint64_t{64} << 10;

// Copies up to `available` bytes between the parts and the ring, from `position` on. Calls publish() after each step.
template <bool kToRing, class Publish>
ptrdiff_t copy_bytes(HostRing& ring, std::span<const iovec> parts, uint64_t& position, uint64_t available,
                     Publish publish) {
    const uint64_t first = position;
    uint64_t step_end = position + kStepBytes;
    for (const iovec& part : parts) {
        auto* data = static_cast<std::byte*>(part.iov_base);
        uint64_t left = std::min<uint64_t>(part.iov_len, available);
        available -= left;
        while (left > 0) {
            const uint64_t place = position % HostRing::kBytes;
            const uint64_t bytes = std::min({left, HostRing::kBytes - place, step_end - position});
            if constexpr (kToRing) {
                std::memcpy(ring.bytes + place, data, bytes);
            } else {
                std::memcpy(data, ring.bytes + place, bytes);
            }
            data += bytes;
            left -= bytes;
            position += bytes;
            if (position < step_end) continue;
            publish();
            step_end += kStepBytes;
        }
    }
    return static_cast<ptrdiff_t>(position - first);
}

uint64_t bytes_of(std::span<const iovec> parts) {
    uint64_t bytes = 0;
    for (const iovec& part : parts) bytes += part.iov_len;
    return bytes;
}

ptrdiff_t fail_with(int error) {
    errno = error;
    return -1;
}

}  // namespace

HostInbox::HostInbox(uint32_t num_rings)
    : num_rings_(num_rings),
      name_{random_number(), random_number()},
      file_(cpu::make_memory_file(num_rings * sizeof(HostRing))),
      mapping_(file_.get(), num_rings * sizeof(HostRing)) {
    for (uint32_t number = 0; number < num_rings; ++number) {
        for (size_t i = 0; i < name_.size(); ++i) ring(number).name[i].store(name_[i], std::memory_order_relaxed);
    }
}

HostInbox::Offer HostInbox::offer() const { return {getpid(), file_.get(), num_rings_, name_}; }

ptrdiff_t HostRingReader::read(std::span<const iovec> parts) {
    const uint64_t available = ring_->written.load(std::memory_order_acquire) - read_;
    if (available == 0) return fail_with(EAGAIN);
    if (available > HostRing::kBytes) return fail_with(EPROTO);
    // The writer needs to know only now and then: to tell it each time would cost it a cache miss per message.
    const auto publish = [&] {
        if (read_ - published_ < kStepBytes) return;
        published_ = read_;
        ring_->read.store(read_, std::memory_order_release);
    };
    const ptrdiff_t got = copy_bytes<false>(*ring_, parts, read_, available, publish);
    publish();
    return got;
}

HostRingWriter::HostRingWriter(const HostInbox::Offer& offer, uint32_t number) {
    require(number < offer.num_rings, ncclSystemError, "its inbox has {} rings, and none of number {}", offer.num_rings,
            number);
    const cpu::FileDescriptor file = cpu::open_of_process(offer.process, static_cast<int>(offer.fd));
    mapping_ = cpu::Mapping(file.get(), sizeof(HostRing), number * sizeof(HostRing));
    for (size_t i = 0; i < offer.name.size(); ++i) {
        require(ring()->name[i].load(std::memory_order_relaxed) == offer.name[i], ncclSystemError,
                "descriptor {} of process {} is not its inbox", offer.fd, offer.process);
    }
}

ptrdiff_t HostRingWriter::write(std::span<const iovec> parts) {
    if (mapping_.data() == nullptr) return fail_with(EAGAIN);
    const auto room = [&] { return HostRing::kBytes - (written_ - known_read_); };
    if (room() < bytes_of(parts)) {
        const uint64_t read = ring()->read.load(std::memory_order_acquire);
        if (written_ - read > HostRing::kBytes) return fail_with(EPROTO);
        known_read_ = read;
        if (room() == 0) return fail_with(EAGAIN);
    }
    const auto publish = [&] { ring()->written.store(written_, std::memory_order_release); };
    const ptrdiff_t put = copy_bytes<true>(*ring(), parts, written_, room(), publish);
    publish();
    return put;
}

}  // namespace crossdock::network
