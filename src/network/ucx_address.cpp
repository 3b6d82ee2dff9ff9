// SPDX-License-Identifier: Apache-2.0
#include "network/ucx_address.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace crossdock::network {
namespace {

// Takes values off the beginning; after one that was not there, all are 0.
class Reader {
  public:
    explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}
    template <class Value>
    Value take() {
        Value value = {};
        const std::span<const std::byte> bytes = skip(sizeof(value));
        if (!bytes.empty()) std::memcpy(&value, bytes.data(), sizeof(value));
        return value;
    }
    std::span<const std::byte> skip(size_t count) {
        is_good_ = is_good_ && count <= rest_.size();
        if (!is_good_) return {};
        const auto skipped = rest_.first(count);
        rest_ = rest_.subspan(count);
        return skipped;
    }
    bool is_good() const { return is_good_; }
    bool is_at_end() const { return is_good_ && rest_.empty(); }

  private:
    std::span<const std::byte> rest_;
    bool is_good_ = true;
};

constexpr uint8_t kHeader = 0x20;  // version 1, with the worker's number and nothing else
constexpr uint8_t kLast = 0x80;    // of devices, of a device's transports
constexpr uint8_t kEmpty = 0x80;   // a device without transports
constexpr uint8_t kHasPaths = 0x40, kHasSystemDevice = 0x20, kDeviceBytes = 0x1f;
constexpr uint8_t kHasEndpoints = 0x40, kTransportBytes = 0x3f;
constexpr int kMostTransports = 64;  // UCX has arrays for as many, or more
// Seconds. Speeds are in bytes per second.
constexpr float kMostOverhead = 1, kMostLatency = 1;

// UCX's shared memory, by its name's checksum: the number of a segment, whose highest bit says that it is opened as a
// descriptor of its process. Otherwise a folder's name follows.
constexpr uint16_t kPosix = 0xd3a7;
bool is_descriptor(std::span<const std::byte> segment) {
    return segment.size() == sizeof(uint64_t) && (segment.back() & std::byte{0x80}) != std::byte{0};
}

bool is_transport(Reader& reader, bool& is_last) {
    const auto name = reader.take<uint16_t>();
    const auto overhead = reader.take<float>();
    const auto bandwidth = reader.take<float>();  // negative: of all that share the device
    const auto latency = reader.take<float>();
    (void)reader.take<uint32_t>();  // priority, abilities
    const auto flags = reader.take<uint8_t>();
    const std::span<const std::byte> place = reader.skip(flags & kTransportBytes);
    is_last = (flags & kLast) != 0;
    return reader.is_good() && (name != kPosix || is_descriptor(place)) && (flags & kHasEndpoints) == 0 &&
           overhead >= 0 && overhead <= kMostOverhead && std::isfinite(bandwidth) && std::abs(latency) <= kMostLatency;
}

}  // namespace

bool is_ucx_address(std::span<const std::byte> bytes) {
    Reader reader(bytes);
    if (reader.take<uint8_t>() != kHeader) return false;
    (void)reader.take<uint64_t>();  // the worker's number
    int num_transports = 0;
    for (bool is_last = false; !is_last;) {
        const auto domain = reader.take<uint8_t>();
        const auto flags = reader.take<uint8_t>();
        (void)reader.skip((flags & kDeviceBytes) + (flags & kHasPaths ? 1 : 0) + (flags & kHasSystemDevice ? 1 : 0));
        is_last = (flags & kLast) != 0;
        for (bool is_last_here = (domain & kEmpty) != 0; !is_last_here;) {
            if (!is_transport(reader, is_last_here) || ++num_transports > kMostTransports) return false;
        }
        if (!reader.is_good()) return false;
    }
    return reader.is_at_end();
}

}  // namespace crossdock::network
