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
constexpr uint64_t kStepBytes = uint64_t{32} << 10;

// Moves up to `available` bytes between the parts and the ring, from `position` on. Publishes each step.
template <bool kToRing>
ptrdiff_t move_bytes(HostRing& ring, std::span<const iovec> parts, uint64_t& position, uint64_t available,
                     std::atomic<uint64_t>& published) {
    const uint64_t first = position;
    uint64_t unpublished = 0;
    for (const iovec& part : parts) {
        auto* data = static_cast<std::byte*>(part.iov_base);
        uint64_t left = std::min<uint64_t>(part.iov_len, available);
        available -= left;
        while (left > 0) {
            const uint64_t place = position % HostRing::kBytes;
            const uint64_t step = std::min({left, HostRing::kBytes - place, kStepBytes - unpublished});
            if constexpr (kToRing) {
                std::memcpy(ring.bytes + place, data, step);
            } else {
                std::memcpy(data, ring.bytes + place, step);
            }
            data += step;
            left -= step;
            position += step;
            unpublished += step;
            if (unpublished < kStepBytes) continue;
            published.store(position, std::memory_order_release);
            unpublished = 0;
        }
    }
    if (unpublished > 0) published.store(position, std::memory_order_release);
    return static_cast<ptrdiff_t>(position - first);
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
    return move_bytes<false>(*ring_, parts, read_, available, ring_->read);
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
    const uint64_t unread = written_ - ring()->read.load(std::memory_order_acquire);
    if (unread == HostRing::kBytes) return fail_with(EAGAIN);
    if (unread > HostRing::kBytes) return fail_with(EPROTO);
    return move_bytes<true>(*ring(), parts, written_, HostRing::kBytes - unread, ring()->written);
}

}  // namespace crossdock::network
