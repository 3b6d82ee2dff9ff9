// SPDX-License-Identifier: Apache-2.0
// NCCL's part: it progresses, polls requests and signals, in one thread.
#include <dlfcn.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "bench/network/measure.h"
#include "plugin/nccl_rma.h"

namespace crossdock::network_bench {
namespace {

constexpr uint32_t kWindow = 64;  // puts that are under way

class Rank {
  public:
    Rank(Meeting& meeting, int rank, const std::string& plugin, uint64_t bytes)
        : peer_(static_cast<uint32_t>(1 - rank)), bytes_(bytes), data_(2 * bytes), words_(8) {
        void* library = dlopen(plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw std::runtime_error(dlerror());
        table_ = static_cast<const plugin::Rma14*>(dlsym(library, "ncclRmaPlugin_v14"));
        if (table_ == nullptr) throw std::runtime_error(plugin + " is no plugin of version 14");
        char handles[2][128];
        void* listener = nullptr;
        check(table_->init(&instance_, 1, nullptr), "init");
        check(table_->listen(instance_, 0, handles[rank], &listener), "listen");
        exchange(meeting, rank, handles[rank], handles[1 - rank]);
        void* both[2] = {handles[0], handles[1]};
        check(table_->connect(instance_, both, 2, rank, listener, &comm_), "connect");
        check(table_->close_listen(listener), "closeListen");
        plugin::Config14 config{1, -1};
        check(table_->create_context(comm_, &config, &contexts_), "createContext");
        check(table_->register_memory(comm_, data_.data(), data_.size(), plugin::kPointerHost, 0, &memory_),
              "regMrSym");
        check(table_->register_memory(comm_, words_.data(), 64, plugin::kPointerHost, 3, &signals_), "regMrSym");
    }
    ~Rank() {
        table_->destroy_context(contexts_);
        table_->close_comm(comm_);
        table_->finalize(instance_);
    }
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;

    void put_signal(uint64_t word, bool is_strong) {
        void* request = nullptr;
        check(table_->put_signal(contexts_, 0, 0, memory_, bytes_, bytes_, memory_, peer_, 8 * word, signals_, 1,
                                 plugin::kSignalAdd, is_strong, &request),
              "iputSignal");
        requests_.push_back(request);
    }
    void put() {
        void* request = nullptr;
        check(table_->put(contexts_, 0, 0, memory_, bytes_, bytes_, memory_, peer_, &request), "iput");
        requests_.push_back(request);
    }

    // What NCCL's loop does: asks for what is under way, then lets the plugin work.
    void poll() {
        std::erase_if(requests_, [&](void* request) {
            int done = 0;
            check(table_->test(comm_, request, &done), "test");
            return done != 0;
        });
        check(table_->progress(contexts_), "rmaProgress");
    }
    void limit(size_t under_way) {
        while (requests_.size() > under_way) poll();
    }
    void await(uint64_t word, uint64_t least) {
        while (std::atomic_ref(words_[word]).load(std::memory_order_acquire) < least) poll();
    }

  private:
    static void check(ncclResult_t result, const char* call) {
        if (result != ncclSuccess) throw std::runtime_error(std::string(call) + " failed");
    }
    const plugin::Rma14* table_ = nullptr;
    uint32_t peer_;
    uint64_t bytes_;
    std::vector<std::byte> data_;
    std::vector<uint64_t> words_;
    void *instance_ = nullptr, *comm_ = nullptr, *contexts_ = nullptr, *memory_ = nullptr, *signals_ = nullptr;
    std::vector<void*> requests_;
};

Result run(Meeting& meeting, int rank, const std::string& plugin, const Amount& amount) {
    Rank self(meeting, rank, plugin, amount.bytes);
    Result result;
    uint64_t turn = 0;
    uint64_t begin = 0;
    const uint32_t warm_up = amount.round_trips / 10 + 1;
    for (uint32_t i = 0; i < warm_up + amount.round_trips; ++i) {
        if (i == warm_up) begin = now_ns();
        ++turn;
        if (rank == 1) self.await(0, turn);
        self.put_signal(0, false);
        if (rank == 0) self.await(0, turn);
    }
    result.half_round_trip_us = static_cast<double>(now_ns() - begin) / 2e3 / amount.round_trips;
    self.limit(0);

    for (uint64_t pass = 1; pass <= 2; ++pass) {  // the first one warms up
        begin = now_ns();
        if (rank == 0) {
            for (uint32_t i = 0; i < amount.messages; ++i) {
                self.put();
                self.limit(kWindow);
            }
            self.put_signal(1, true);
        } else {
            self.await(1, pass);
            self.put_signal(1, true);
        }
        self.limit(0);
        if (rank == 0) self.await(1, pass);
    }
    const auto sent = static_cast<double>(amount.bytes) * (amount.messages + 1);
    result.gigabytes_per_s = sent / static_cast<double>(now_ns() - begin);
    return result;
}

}  // namespace

Result measure_plugin(const Amount& amount, const std::string& plugin, const std::string& transports) {
    return run_pair(transports, [&](Meeting& meeting, int rank) { return run(meeting, rank, plugin, amount); });
}

}  // namespace crossdock::network_bench
