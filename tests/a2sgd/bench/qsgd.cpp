// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "tests/a2sgd/bench/averaging.h"
#include "tools/common/random.h"

namespace crossdock::bench {
namespace {

constexpr size_t kBucket = 512;
constexpr int kLevels = 7;  // of a magnitude: three bits, and one for the sign
constexpr size_t kBucketBytes = sizeof(float) + kBucket / 2;

class Qsgd : public Averaging {
  public:
    Qsgd(Wire& wire, int rank, uint64_t seed)
        : wire_(wire), rank_(rank), random_(seed * 4096 + static_cast<uint64_t>(rank)) {}

    std::string name() const override { return "qsgd"; }
    uint64_t bytes_sent() const override { return wire_.bytes_sent(rank_); }
    uint64_t message_bits(size_t entries) const override { return 8 * kBucketBytes * buckets_of(entries); }

    void average(std::vector<float>& gradient) override {
        std::vector<std::byte> own(kBucketBytes * buckets_of(gradient.size()));
        for (size_t bucket = 0; bucket * kBucket < gradient.size(); ++bucket)
            encode(gradient, bucket * kBucket, own.data() + bucket * kBucketBytes);
        std::fill(gradient.begin(), gradient.end(), 0.0f);
        for (const std::vector<std::byte>& message : wire_.all_gather(rank_, own)) {
            for (size_t bucket = 0; bucket * kBucket < gradient.size(); ++bucket)
                add_decoded(message.data() + bucket * kBucketBytes, gradient, bucket * kBucket);
        }
    }

  private:
    static size_t buckets_of(size_t entries) { return (entries + kBucket - 1) / kBucket; }

    void encode(const std::vector<float>& gradient, size_t first, std::byte* target) {
        const size_t end = std::min(first + kBucket, gradient.size());
        float largest = 0;
        for (size_t i = first; i < end; ++i) largest = std::max(largest, std::abs(gradient[i]));
        std::memcpy(target, &largest, sizeof(largest));
        for (size_t i = first; i < end; ++i) {
            const double scaled = largest > 0 ? kLevels * std::abs(gradient[i]) / static_cast<double>(largest) : 0;
            const double below = std::floor(scaled);
            const auto level = static_cast<unsigned>(below + (random_.uniform() < scaled - below ? 1 : 0));
            const unsigned code = level | (gradient[i] < 0 ? 8u : 0u);
            target[sizeof(largest) + (i - first) / 2] |= static_cast<std::byte>(code << (i % 2 * 4));
        }
    }

    void add_decoded(const std::byte* source, std::vector<float>& gradient, size_t first) const {
        float largest;
        std::memcpy(&largest, source, sizeof(largest));
        const float unit = largest / static_cast<float>(kLevels * wire_.num_ranks());
        for (size_t i = first; i < std::min(first + kBucket, gradient.size()); ++i) {
            const unsigned code = static_cast<unsigned>(source[sizeof(largest) + (i - first) / 2]) >> (i % 2 * 4) & 15;
            const float magnitude = unit * static_cast<float>(code & 7);
            gradient[i] += (code & 8) != 0 ? -magnitude : magnitude;
        }
    }

    Wire& wire_;
    int rank_;
    tools::Random random_;
};

}  // namespace

std::unique_ptr<Averaging> make_qsgd(Wire& wire, int rank, uint64_t seed) {
    return std::make_unique<Qsgd>(wire, rank, seed);
}

}  // namespace crossdock::bench
