// SPDX-License-Identifier: Apache-2.0
// Acts as NCCL: one rank's communicator, contexts and memory through the plugin's table of functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plugin/nccl_rma.h"
#include "ranks.h"

namespace crossdock::network {

// The message of this process's last failed call.
std::string last_message();

class Session {
  public:
    // Collective.
    explicit Session(TestRank& rank, int num_contexts = 1);
    ~Session() { close(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    void close();

    const plugin::Rma14& table() const { return ncclRmaPlugin_v14; }
    void* comm() const { return comm_; }
    void* contexts() const { return contexts_; }

    // Collective. This and all functions below throw with the plugin's message if a call fails.
    void* add_memory(void* data, size_t bytes, int type = plugin::kPointerHost, uint64_t flags = 0);
    void remove_memory(void* memory);
    // Ends NCCL's progress thread.
    void destroy_contexts();

    void* put(int peer, void* source, uint64_t source_offset, size_t bytes, void* target, uint64_t target_offset,
              int context = 0);
    void* put_signal(int peer, void* source, uint64_t source_offset, size_t bytes, void* target, uint64_t target_offset,
                     void* signals, uint64_t signal_offset, uint64_t value, bool is_strong, int context = 0);
    void* signal(int peer, void* signals, uint64_t signal_offset, uint64_t value, bool is_strong = true,
                 int context = 0) {
        return put_signal(peer, nullptr, 0, 0, nullptr, 0, signals, signal_offset, value, is_strong, context);
    }
    void* get(int peer, void* remote, uint64_t remote_offset, size_t bytes, void* local, uint64_t local_offset,
              int context = 0);
    void* flush(int peer, int context = 0);
    bool test(void* request);
    void progress();
    void finish(void* request);

    // Progresses until the word has reached `least`.
    void await_word(const uint64_t& word, uint64_t least);

  private:
    void check(ncclResult_t result, const char* call) const;
    void* instance_ = nullptr;
    void* comm_ = nullptr;
    void* contexts_ = nullptr;
};

// The result of a call that must fail, and its message.
void expect_refused(TestRank& rank, ncclResult_t result, ncclResult_t wanted, std::initializer_list<const char*> words);

}  // namespace crossdock::network
