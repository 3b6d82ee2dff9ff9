// SPDX-License-Identifier: Apache-2.0
// The bytes of a greeting.
#include <cstring>

#include "network/handshake.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kGreetingMagic = 0x6f6c6c6568736478;  // "xdshello"

struct Head {
    uint64_t magic;
    uint32_t source;
    uint32_t target;
    uint32_t num_ranks;
    uint32_t blob_bytes;
    uint64_t proof;  // hash of all else under the receiver's secret
};

uint64_t proof_of(const Secret& secret, Head head, std::span<const std::byte> blob) {
    head.proof = 0;
    std::vector<std::byte> bytes(sizeof(head) + blob.size());
    std::memcpy(bytes.data(), &head, sizeof(head));
    if (!blob.empty()) std::memcpy(bytes.data() + sizeof(head), blob.data(), blob.size());
    return keyed_hash(secret, bytes);
}

}  // namespace

std::vector<std::byte> make_greeting(std::span<const RankAddress> addresses, uint32_t source, uint32_t target,
                                     std::span<const std::byte> blob) {
    Head head{
        kGreetingMagic, source, target, static_cast<uint32_t>(addresses.size()), static_cast<uint32_t>(blob.size()), 0};
    head.proof = proof_of(addresses[target].secret, head, blob);
    std::vector<std::byte> bytes(sizeof(head) + blob.size());
    std::memcpy(bytes.data(), &head, sizeof(head));
    if (!blob.empty()) std::memcpy(bytes.data() + sizeof(head), blob.data(), blob.size());
    return bytes;
}

size_t greeting_bytes(std::span<const std::byte> begun) {
    Head head;
    if (begun.size() < sizeof(head)) return sizeof(head);
    std::memcpy(&head, begun.data(), sizeof(head));
    return sizeof(head) + head.blob_bytes;
}

Greeting read_greeting(std::span<const std::byte> bytes, std::span<const RankAddress> addresses, uint32_t target,
                       uint32_t& source, std::span<const std::byte>& blob) {
    Head head;
    const size_t magic_bytes = bytes.size() < sizeof(head.magic) ? bytes.size() : sizeof(head.magic);
    // Who speaks another protocol is turned away at the first byte.
    if (magic_bytes > 0 && std::memcmp(bytes.data(), &kGreetingMagic, magic_bytes) != 0) return Greeting::kBad;
    if (bytes.size() < sizeof(head)) return Greeting::kMore;
    std::memcpy(&head, bytes.data(), sizeof(head));
    const bool sensible = head.source < addresses.size() && head.target == target && head.source != target &&
                          head.num_ranks == addresses.size() && head.blob_bytes <= kMaxBlobBytes;
    if (!sensible || bytes.size() > sizeof(head) + head.blob_bytes) return Greeting::kBad;
    if (bytes.size() < sizeof(head) + head.blob_bytes) return Greeting::kMore;
    blob = bytes.subspan(sizeof(head));
    if (head.proof != proof_of(addresses[target].secret, head, blob)) return Greeting::kBad;
    source = head.source;
    return Greeting::kGood;
}

}  // namespace crossdock::network
