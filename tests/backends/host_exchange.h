// SPDX-License-Identifier: Apache-2.0
// A barrier and an all-gather among the ranks of a test, in memory that threads and forked processes share. For the GPU
// backends, whose communicators offer no such thing to programs.
#pragma once

#include <atomic>
#include <cstddef>

namespace crossdock::testing {

class HostExchange {
  public:
    // Made before the ranks start.
    explicit HostExchange(int num_ranks);
    ~HostExchange();
    HostExchange(const HostExchange&) = delete;
    HostExchange& operator=(const HostExchange&) = delete;

    // Throws after two minutes without the others.
    void barrier();
    void all_gather(int rank, const void* own, void* all, size_t bytes);

  private:
    struct Shared;
    int num_ranks_;
    size_t bytes_;
    Shared* shared_;
};

}  // namespace crossdock::testing
