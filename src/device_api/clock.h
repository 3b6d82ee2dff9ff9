// SPDX-License-Identifier: Apache-2.0
// A vector clock of the simulation: the time of each thread that its owner has synchronized with, and the puts whose
// source it knows to be read or whose data it knows to have landed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace crossdock::device_api {

class Clock {
  public:
    uint64_t of_thread(uint32_t thread) const { return thread < threads_.size() ? threads_[thread] : 0; }
    // Advances the thread's own time: holders of an earlier copy of this clock do not know what it does next.
    void tick(uint32_t thread) {
        if (threads_.size() <= thread) threads_.resize(thread + 1);
        ++threads_[thread];
    }

    void learn_read(uint64_t put) { set(2 * put); }
    void learn_landed(uint64_t put) { set(2 * put), set(2 * put + 1); }
    bool knows_read(uint64_t put) const { return has(2 * put); }
    bool knows_landed(uint64_t put) const { return has(2 * put + 1); }

    void join(const Clock& other) {
        if (threads_.size() < other.threads_.size()) threads_.resize(other.threads_.size());
        for (size_t i = 0; i < other.threads_.size(); ++i) threads_[i] = std::max(threads_[i], other.threads_[i]);
        if (puts_.size() < other.puts_.size()) puts_.resize(other.puts_.size());
        for (size_t i = 0; i < other.puts_.size(); ++i) puts_[i] |= other.puts_[i];
    }

  private:
    void set(uint64_t bit) {
        if (puts_.size() <= bit / 64) puts_.resize(bit / 64 + 1);
        puts_[bit / 64] |= uint64_t{1} << bit % 64;
    }
    bool has(uint64_t bit) const { return bit / 64 < puts_.size() && (puts_[bit / 64] >> bit % 64 & 1) != 0; }

    std::vector<uint64_t> threads_;  // times; they do not wrap around
    std::vector<uint64_t> puts_;     // two bits each: read, landed
};

}  // namespace crossdock::device_api
