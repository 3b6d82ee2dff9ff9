// SPDX-License-Identifier: Apache-2.0
// Kernels put and signal through NCCL's GPU-initiated networking and the network plugin: bytes have landed when their
// signals arrive, in every order that the interface allows. Then measurements. Ranks are threads that share the GPUs.
//
//   NCCL_RMA_PLUGIN=.../libnccl-rma-crossdock.so plugin_gpu_test [--ranks N] [--rounds N] [--measure] [--json FILE]
#include <dlfcn.h>

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "copy_pipeline.h"
#include "kernels.h"

namespace crossdock::plugin_test {
namespace {

#define CROSSDOCK_NCCL_CALLS(F) \
    F(ncclGetVersion)           \
    F(ncclGetUniqueId)          \
    F(ncclCommInitRank)         \
    F(ncclCommDestroy)          \
    F(ncclCommGetAsyncError)    \
    F(ncclMemAlloc)             \
    F(ncclMemFree)              \
    F(ncclCommWindowRegister)   \
    F(ncclCommWindowDeregister) \
    F(ncclDevCommCreate)        \
    F(ncclDevCommDestroy)       \
    F(ncclGetLastError)

struct Nccl {
#define CROSSDOCK_MEMBER(name) decltype(&::name) name;
    CROSSDOCK_NCCL_CALLS(CROSSDOCK_MEMBER)
#undef CROSSDOCK_MEMBER
};

Nccl open_nccl() {
    const char* named = std::getenv("CROSSDOCK_NCCL_LIBRARY");
    void* library = dlopen(named != nullptr && *named != '\0' ? named : "libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    Nccl nccl{};
#define CROSSDOCK_RESOLVE(name)                                               \
    nccl.name = reinterpret_cast<decltype(nccl.name)>(dlsym(library, #name)); \
    if (nccl.name == nullptr) throw std::runtime_error("this NCCL has no " #name);
    CROSSDOCK_NCCL_CALLS(CROSSDOCK_RESOLVE)
#undef CROSSDOCK_RESOLVE
    return nccl;
}

struct Options {
    int ranks = 4;
    uint32_t rounds = 20;
    bool measures = false;
    const char* json = nullptr;
};

struct Measurement {
    const char* what;
    uint64_t bytes;
    uint32_t rounds;
    double ns;
};

class Ranks {
  public:
    Ranks(const Options& options) : options_(options), nccl_(open_nccl()), barrier_(options.ranks) {
        check(nccl_.ncclGetUniqueId(&id_), nullptr, "ncclGetUniqueId");
    }

    int run() {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < options_.ranks; ++rank) {
            threads.emplace_back([this, rank] {
                try {
                    run_rank(rank);
                } catch (const std::exception& error) {
                    fmt::print("rank {}: {}\n", rank, error.what());
                    std::fflush(stdout);
                    std::_Exit(1);  // the others wait for this one
                }
            });
        }
        for (std::thread& thread : threads) thread.join();
        report();
        return failed_ ? 1 : 0;
    }

  private:
    static void check(cudaError_t result, const char* call) {
        if (result == cudaSuccess) return;
        throw std::runtime_error(fmt::format("{} failed: {}", call, cudaGetErrorString(result)));
    }

    void check(ncclResult_t result, ncclComm_t comm, const char* call) const {
        if (result == ncclSuccess) return;
        throw std::runtime_error(
            fmt::format("{} gave {}: {}", call, static_cast<int>(result), nccl_.ncclGetLastError(comm)));
    }

    static int num_plugin_contexts() {
        void* plugin = dlopen(std::getenv("NCCL_RMA_PLUGIN"), RTLD_NOW | RTLD_NOLOAD);
        if (plugin == nullptr) return -1;
        const auto count = reinterpret_cast<int (*)()>(dlsym(plugin, "crossdockRmaPluginContexts"));
        return count == nullptr ? -1 : count();
    }

    void run_rank(int rank) {
        int num_devices = 0;
        check(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
        check(cudaSetDevice(rank % num_devices), "cudaSetDevice");
        check(load_kernels(), "loading the kernels");
        cudaStream_t stream = nullptr;
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
        ncclComm_t comm = nullptr;
        check(nccl_.ncclCommInitRank(&comm, options_.ranks, id_, rank), nullptr, "ncclCommInitRank");

        Job job{};
        job.layout = {uint64_t{4} << 20, static_cast<uint64_t>(options_.ranks)};
        void* memory = nullptr;
        check(nccl_.ncclMemAlloc(&memory, job.layout.bytes()), comm, "ncclMemAlloc");
        check(cudaMemset(memory, 0, job.layout.bytes()), "cudaMemset");
        check(nccl_.ncclCommWindowRegister(comm, memory, job.layout.bytes(), &job.window, NCCL_WIN_DEFAULT), comm,
              "ncclCommWindowRegister");
        ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
        needs.ginContextCount = 1;
        needs.ginSignalCount = kSignalKinds * options_.ranks;
        needs.ginCounterCount = kNumCounters;
        needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
        check(nccl_.ncclDevCommCreate(comm, &needs, &job.comm), comm, "ncclDevCommCreate");
        if (rank == 0) {
            int version = 0;
            nccl_.ncclGetVersion(&version);
            fmt::print("NCCL {}, {} ranks, blocks of contexts of the plugin: {}\n", version, options_.ranks,
                       num_plugin_contexts());
            if (num_plugin_contexts() <= 0) throw std::runtime_error("NCCL does not use the plugin");
        }
        job.local = static_cast<std::byte*>(memory);
        void* results = nullptr;
        check(cudaHostAlloc(&results, 4096, cudaHostAllocMapped), "cudaHostAlloc");
        std::memset(results, 0, 4096);
        job.failure = static_cast<Failure*>(results);
        job.times = reinterpret_cast<uint64_t*>(static_cast<std::byte*>(results) + 2048);
        barrier_.arrive_and_wait();

        for (const uint64_t bytes : {uint64_t{16}, uint64_t{4096}, uint64_t{100'000}, uint64_t{4} << 20}) {
            job.bytes = bytes;
            job.rounds = options_.rounds;
            launch_orders(job, stream);
            finish(rank, job, stream, fmt::format("all orders, {} bytes, {} rounds", bytes, job.rounds));
            job.first_round += job.rounds;
        }
        if (options_.measures) measure(rank, job, stream);

        ncclResult_t asynchronous = ncclSuccess;
        check(nccl_.ncclCommGetAsyncError(comm, &asynchronous), comm, "ncclCommGetAsyncError");
        check(asynchronous, comm, "the communicator");
        check(nccl_.ncclDevCommDestroy(comm, &job.comm), comm, "ncclDevCommDestroy");
        check(nccl_.ncclCommWindowDeregister(comm, job.window), comm, "ncclCommWindowDeregister");
        check(nccl_.ncclMemFree(memory), comm, "ncclMemFree");
        barrier_.arrive_and_wait();
        check(nccl_.ncclCommDestroy(comm), nullptr, "ncclCommDestroy");
    }

    void finish(int rank, const Job& job, cudaStream_t stream, const std::string& what) {
        check(cudaStreamSynchronize(stream), "a kernel");
        const Failure& failure = *job.failure;
        if (failure.step != Step::kNone) {
            failed_ = true;
            const std::lock_guard lock(mutex_);
            fmt::print("rank {}: step {}, round {}: {} peer {} at {}: expected {:#x}, saw {:#x}\n", rank,
                       static_cast<uint32_t>(failure.step), failure.round,
                       failure.is_timeout != 0 ? "waited too long for" : "wrong bytes of", failure.peer, failure.place,
                       failure.expected, failure.seen);
        }
        barrier_.arrive_and_wait();
        if (rank == 0 && !what.empty()) fmt::print("{}: {}\n", failed_ ? "FAILED" : "ok", what);
        std::fflush(stdout);
        if (failed_) throw std::runtime_error("stopped after a failure");
    }

    void measure(int rank, Job& job, cudaStream_t stream) {
        job.signals_before = job.first_round;  // one of each kind a round
        for (uint64_t bytes = 8; bytes <= (uint64_t{4} << 20); bytes *= 8) {
            job.bytes = bytes;
            for (const uint32_t rounds : {20u, bytes <= 65536 ? 500u : 50u}) {
                job.rounds = rounds;
                launch_ping_pong(job, stream);
                finish(rank, job, stream, "");
                job.signals_before += rounds;
            }
            if (rank == 0) {
                measurements_.push_back(
                    {"half round trip", bytes, job.rounds, static_cast<double>(job.times[0]) / (2.0 * job.rounds)});
            }
        }
        job.signals_before = job.first_round;
        for (uint64_t bytes = 65536; bytes <= (uint64_t{4} << 20); bytes *= 4) {
            job.bytes = bytes;
            job.rounds = static_cast<uint32_t>((uint64_t{512} << 20) / bytes);
            launch_stream(job, stream);
            finish(rank, job, stream, "");
            ++job.signals_before;
            if (rank == 0) {
                measurements_.push_back({"stream", bytes, job.rounds, static_cast<double>(job.times[0]) / job.rounds});
                measurements_.push_back(
                    {"copy pipeline", bytes, job.rounds, pipelined_copies_ns(bytes, job.rounds) / job.rounds});
            }
            barrier_.arrive_and_wait();
        }
    }

    void report() const {
        FILE* json = options_.json != nullptr ? std::fopen(options_.json, "we") : nullptr;
        if (json != nullptr) fmt::print(json, "[");
        for (size_t i = 0; i < measurements_.size(); ++i) {
            const Measurement& each = measurements_[i];
            fmt::print("{:16} {:>9} bytes {:>10.2f} us {:>8.2f} GB/s\n", each.what, each.bytes, each.ns / 1e3,
                       static_cast<double>(each.bytes) / each.ns);
            if (json != nullptr) {
                fmt::print(json, "{}\n {{\"what\": \"{}\", \"bytes\": {}, \"rounds\": {}, \"ns\": {:.1f}}}",
                           i == 0 ? "" : ",", each.what, each.bytes, each.rounds, each.ns);
            }
        }
        if (json == nullptr) return;
        fmt::print(json, "\n]\n");
        std::fclose(json);
    }

    Options options_;
    Nccl nccl_;
    ncclUniqueId id_{};
    std::barrier<> barrier_;
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
    std::vector<Measurement> measurements_;
};

int main_of(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
        if (name == "--measure") {
            options.measures = true;
        } else if (value != nullptr && name == "--ranks") {
            options.ranks = std::atoi(argv[++i]);
        } else if (value != nullptr && name == "--rounds") {
            options.rounds = static_cast<uint32_t>(std::atoi(argv[++i]));
        } else if (value != nullptr && name == "--json") {
            options.json = argv[++i];
        } else {
            fmt::print(stderr, "plugin_gpu_test [--ranks N] [--rounds N] [--measure] [--json FILE]\n");
            return 2;
        }
    }
    if (std::getenv("NCCL_RMA_PLUGIN") == nullptr) {
        fmt::print(stderr, "set NCCL_RMA_PLUGIN to libnccl-rma-crossdock.so\n");
        return 2;
    }
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    return Ranks(options).run();
}

}  // namespace
}  // namespace crossdock::plugin_test

int main(int argc, char** argv) {
    try {
        return crossdock::plugin_test::main_of(argc, argv);
    } catch (const std::exception& error) {
        fmt::print(stderr, "plugin_gpu_test: {}\n", error.what());
        return 1;
    }
}
