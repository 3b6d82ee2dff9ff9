// SPDX-License-Identifier: Apache-2.0
// What a test's program sees of the backend it runs in: one rank, its communicator, its memory and streams. The same
// program runs as a thread, a process, a fiber of the simulation, and on a GPU.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "crossdock.h"

namespace crossdock::testing {

// Ends a rank's program after a check that the rest depends on. The failure has been recorded already.
struct StopProgram : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Memory that peers can reach. Without a handle where NCCL makes no window.
struct Window {
    ncclWindow_t handle = nullptr;
    std::byte* memory = nullptr;
    size_t bytes = 0;
};

// What runs beside a rank's own program: a thread or, in the simulation, another fiber.
class Beside {
  public:
    virtual ~Beside() = default;  // waits until it has ended
    // The same. Throws what it threw.
    virtual void join() = 0;
};

// A captured CUDA graph, ready to be launched.
using Graph = void*;

class RankContext {
  public:
    RankContext(ncclComm_t comm, int rank, int num_ranks) : comm_(comm), rank_(rank), num_ranks_(num_ranks) {}
    virtual ~RankContext() = default;
    RankContext(const RankContext&) = delete;
    RankContext& operator=(const RankContext&) = delete;

    ncclComm_t comm() const { return comm_; }
    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }

    // Device memory, 256-byte aligned. What was not freed goes when the program ends.
    virtual void* allocate(size_t bytes) = 0;
    virtual void deallocate(void* memory) = 0;

    // In stream order; the copy is done when the call returns.
    virtual void copy_to_device(void* target, const void* source, size_t bytes, cudaStream_t stream) = 0;
    virtual void copy_to_host(void* target, const void* source, size_t bytes, cudaStream_t stream) = 0;

    // A new stream that waits for no other; it lives as long as the program.
    virtual cudaStream_t make_stream() = 0;
    virtual void synchronize(cudaStream_t stream) = 0;

    // Graphs, where the backend has them.
    virtual bool has_graphs() const { return false; }
    virtual Graph capture(cudaStream_t, const std::function<void()>&) {
        throw std::logic_error("this backend has no graphs");
    }
    // The grids of the kernels that a capture of work holds. Nothing runs.
    virtual std::vector<unsigned> captured_blocks(cudaStream_t, const std::function<void()>&) {
        throw std::logic_error("this backend has no graphs");
    }
    virtual void launch(Graph, cudaStream_t) { throw std::logic_error("this backend has no graphs"); }

    // Zeroed window memory. Collective.
    virtual Window make_window(size_t bytes) = 0;
    virtual void destroy_window(const Window& window) = 0;

    // Among the test's programs, beside the library's own communication where that is possible. Collective.
    virtual void barrier() = 0;
    virtual void all_gather(const void* own, void* all, size_t bytes) = 0;

    // Another communicator of the same ranks, for tests with two. Collective; it lives as long as the program.
    virtual ncclComm_t make_communicator() = 0;

    // Runs it beside this program. CPUs only.
    virtual std::unique_ptr<Beside> run_beside(std::function<void()>) {
        throw std::logic_error("nothing runs beside this backend's programs");
    }
    // After a failed look at what others write: lets them run.
    virtual void pause();
    // After a step of the caller's own: lets others run.
    virtual void yield();

    virtual bool is_simulated() const { return false; }
    virtual bool is_gpu() const { return false; }

    // ---- Checks ----
    // The first failures of a rank are kept; the test that runs the program reports them.
    void record_failure(const char* file, int line, const std::string& message);
    const std::vector<std::string>& failures() const { return failures_; }

    // A fingerprint of everything that the program saw; equal runs have equal ones.
    void add_to_digest(const void* bytes, size_t size);
    uint64_t digest() const { return digest_; }

  private:
    ncclComm_t comm_;
    int rank_;
    int num_ranks_;
    std::vector<std::string> failures_;
    uint64_t digest_ = 0xCBF29CE484222325u;
};

const char* result_name(ncclResult_t result);

// A status that must be ncclSuccess, else the program stops with the library's message.
void require_success(RankContext& context, ncclResult_t result, const char* file, int line, const char* call);

// A status that must be `expected`, with a message that contains `word`.
void check_refused(RankContext& context, ncclResult_t result, ncclResult_t expected, const std::string& word,
                   const char* file, int line, const char* call);

}  // namespace crossdock::testing

#define RANK_OK(context, call) ::crossdock::testing::require_success(context, call, __FILE__, __LINE__, #call)

// The comma first leaves another message behind, so that a call that says nothing shows it.
#define RANK_REFUSED(context, expected, word, call)                                                           \
    ::crossdock::testing::check_refused(context, (ncclEpGetVersion(nullptr), call), expected, word, __FILE__, \
                                        __LINE__, #call)

// RANK_CHECK(context, condition, "format", values...): records a failure and goes on.
#define RANK_CHECK(context, condition, ...)                                                             \
    do {                                                                                                \
        if (!(condition)) {                                                                             \
            (context).record_failure(__FILE__, __LINE__, #condition ": " + ::fmt::format(__VA_ARGS__)); \
        }                                                                                               \
    } while (false)
