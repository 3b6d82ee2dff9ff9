// SPDX-License-Identifier: Apache-2.0
// The bytes of a greeting.
#include <algorithm>
#include <cstring>

#include "network/handshake.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kChallengeMagic = 0x3267'6c6c'6168'6378;  // "xchallg2"
constexpr uint64_t kGreetingMagic = 0x3268'6c6c'6568'6478;   // "xdhellh2"

struct Head {
    uint64_t magic;
    uint32_t source;
    uint32_t target;
    uint32_t num_ranks;
    uint32_t blob_bytes;
    Secret nonce;
    uint64_t proof;  // hash of the fields above and the answered nonce, keyed with the receiver's secret
};
using BlobProof = uint64_t;  // hash of the blob, the head and the answered nonce; follows the blob

uint64_t proof_of(const Secret& secret, Head head, const Secret& answers, std::span<const std::byte> blob) {
    std::vector<std::byte> bytes(sizeof(head) + sizeof(answers) + blob.size());
    std::memcpy(bytes.data(), &head, sizeof(head));
    std::memcpy(bytes.data() + sizeof(head), &answers, sizeof(answers));
    if (!blob.empty()) std::memcpy(bytes.data() + sizeof(head) + sizeof(answers), blob.data(), blob.size());
    return keyed_hash(secret, bytes);
}

}  // namespace

Challenge make_challenge() { return {kChallengeMagic, random_secret()}; }
bool is_challenge(const Challenge& challenge) { return challenge.magic == kChallengeMagic; }

std::vector<std::byte> make_greeting(std::span<const RankAddress> addresses, uint32_t source, uint32_t target,
                                     const Secret& answers, const Secret& nonce, std::span<const std::byte> blob) {
    const auto num_ranks = static_cast<uint32_t>(addresses.size());
    Head head{kGreetingMagic, source, target, num_ranks, static_cast<uint32_t>(blob.size()), nonce, 0};
    // The blob's proof covers the head with its proof, so the two proofs differ even for an empty blob.
    head.proof = proof_of(addresses[target].secret, head, answers, {});
    const BlobProof blob_proof = proof_of(addresses[target].secret, head, answers, blob);
    std::vector<std::byte> bytes(sizeof(head) + blob.size() + sizeof(blob_proof));
    std::memcpy(bytes.data(), &head, sizeof(head));
    if (!blob.empty()) std::memcpy(bytes.data() + sizeof(head), blob.data(), blob.size());
    std::memcpy(bytes.data() + sizeof(head) + blob.size(), &blob_proof, sizeof(blob_proof));
    return bytes;
}

size_t greeting_bytes(std::span<const std::byte> begun) {
    Head head;
    if (begun.size() < sizeof(head)) return sizeof(head);
    std::memcpy(&head, begun.data(), sizeof(head));
    return sizeof(head) + head.blob_bytes + sizeof(BlobProof);
}

Greeting read_greeting(std::span<const std::byte> bytes, std::span<const RankAddress> addresses, uint32_t target,
                       const Secret& asked, Greeted& greeted) {
    // Refuse other protocols at the first wrong byte.
    const size_t known = std::min(bytes.size(), sizeof(kGreetingMagic));
    if (known > 0 && std::memcmp(bytes.data(), &kGreetingMagic, known) != 0) return Greeting::kBad;
    Head head;
    if (bytes.size() < sizeof(head)) return Greeting::kMore;
    std::memcpy(&head, bytes.data(), sizeof(head));
    if (head.target != target || head.source >= addresses.size() || head.source == target ||
        head.num_ranks != addresses.size() || head.blob_bytes > kMaxBlobBytes)
        return Greeting::kBad;
    const Secret& secret = addresses[target].secret;
    Head unproven = head;
    unproven.proof = 0;
    if (head.proof != proof_of(secret, unproven, asked, {})) return Greeting::kBad;
    greeted.is_proven = true;
    greeted.source = head.source;
    greeted.nonce = head.nonce;
    const size_t total = greeting_bytes(bytes);
    if (bytes.size() > total) return Greeting::kBad;
    if (bytes.size() < total) return Greeting::kMore;
    const auto blob = bytes.subspan(sizeof(head), head.blob_bytes);
    BlobProof blob_proof;
    std::memcpy(&blob_proof, bytes.data() + sizeof(head) + head.blob_bytes, sizeof(blob_proof));
    if (blob_proof != proof_of(secret, head, asked, blob)) return Greeting::kBad;
    greeted.blob = blob;
    return Greeting::kGood;
}

}  // namespace crossdock::network
