// SPDX-License-Identifier: Apache-2.0
// A wire between the ranks of one process, in memory, that counts what each sends. For comparing ways to average: every
// rank is a thread, and all call the same functions in the same order.
#pragma once

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace crossdock::bench {

class Wire {
  public:
    explicit Wire(int num_ranks)
        : sources_(static_cast<size_t>(num_ranks)),
          sizes_(static_cast<size_t>(num_ranks)),
          sent_(sources_.size()),
          barrier_(num_ranks) {}

    int num_ranks() const { return static_cast<int>(sources_.size()); }
    uint64_t bytes_sent(int rank) const { return sent_[static_cast<size_t>(rank)]; }

    // Sends own bytes to the next rank of a ring, and receives the previous rank's; as many on every rank.
    void pass_on(int rank, const void* own, void* received, size_t bytes) {
        const size_t previous = static_cast<size_t>(rank + num_ranks() - 1) % sources_.size();
        publish(rank, own, bytes);
        std::memcpy(received, sources_[previous], bytes);
        barrier_.arrive_and_wait();
        sent_[static_cast<size_t>(rank)] += num_ranks() > 1 ? bytes : 0;
    }

    // Sends own bytes to all ranks. Returns all ranks' bytes, one vector per rank; sizes may differ.
    std::vector<std::vector<std::byte>> all_gather(int rank, const std::vector<std::byte>& own) {
        publish(rank, own.data(), own.size());
        std::vector<std::vector<std::byte>> all;
        for (size_t peer = 0; peer < sources_.size(); ++peer)
            all.emplace_back(sources_[peer], sources_[peer] + sizes_[peer]);
        barrier_.arrive_and_wait();
        sent_[static_cast<size_t>(rank)] += own.size() * (sources_.size() - 1);
        return all;
    }

  private:
    void publish(int rank, const void* own, size_t bytes) {
        sources_[static_cast<size_t>(rank)] = static_cast<const std::byte*>(own);
        sizes_[static_cast<size_t>(rank)] = bytes;
        barrier_.arrive_and_wait();
    }

    std::vector<const std::byte*> sources_;
    std::vector<size_t> sizes_;
    std::vector<uint64_t> sent_;
    std::barrier<> barrier_;
};

}  // namespace crossdock::bench
