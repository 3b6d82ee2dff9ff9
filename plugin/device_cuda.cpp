// SPDX-License-Identifier: Apache-2.0
// Device memory through CUDA's driver, opened at run time. Kernels wait for what is done here, so nothing may be called
// that waits for kernels: all memory and streams are created with the communicator, and afterwards there are only
// asynchronous copies, and words written by the stream. These words also signal completion, so no event is queried.
// Short copies to the host carry their own flag.
#include <cuda.h>
#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <random>

#include "core/error.h"
#include "plugin/boundary.h"
#include "plugin/objects.h"

namespace crossdock::plugin {
namespace {

constexpr uint64_t kStagingBytes = uint64_t{16} << 20;
constexpr uint64_t kWordsBytes = 4096;  // a page of its own, since the CPU polls it
constexpr uint64_t kWatchedBytes = 8192;
constexpr uint32_t kMaxEmptyPolls = 512;  // of a watched copy, before a completion word is queued

#define CROSSDOCK_DRIVER_FUNCTIONS(F)    \
    F(cuCtxGetCurrent)                   \
    F(cuCtxPushCurrent)                  \
    F(cuCtxPopCurrent)                   \
    F(cuCtxGetStreamPriorityRange)       \
    F(cuStreamCreateWithPriority)        \
    F(cuStreamDestroy)                   \
    F(cuStreamWriteValue64)              \
    F(cuMemAlloc)                        \
    F(cuMemFree)                         \
    F(cuMemHostAlloc)                    \
    F(cuMemFreeHost)                     \
    F(cuMemHostGetDevicePointer)         \
    F(cuMemcpyHtoDAsync)                 \
    F(cuMemcpyDtoHAsync)                 \
    F(cuThreadExchangeStreamCaptureMode) \
    F(cuGetErrorString)

// cuda.h gives some functions a suffix with a macro of the same name.
#define CROSSDOCK_TEXT(name) #name
#define CROSSDOCK_EXPANDED_TEXT(name) CROSSDOCK_TEXT(name)

struct Driver {
#define CROSSDOCK_MEMBER(name) decltype(&::name) name##_function = nullptr;
    CROSSDOCK_DRIVER_FUNCTIONS(CROSSDOCK_MEMBER)
#undef CROSSDOCK_MEMBER
    bool is_complete = true;
};

Driver open_driver() {
    Driver driver;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        driver.is_complete = false;
        return driver;
    }
#define CROSSDOCK_RESOLVE(name)                                                                            \
    driver.name##_function =                                                                               \
        reinterpret_cast<decltype(driver.name##_function)>(dlsym(library, CROSSDOCK_EXPANDED_TEXT(name))); \
    driver.is_complete &= driver.name##_function != nullptr;
    CROSSDOCK_DRIVER_FUNCTIONS(CROSSDOCK_RESOLVE)
#undef CROSSDOCK_RESOLVE
    return driver;
}

const Driver& driver() {
    static const Driver opened = open_driver();
    return opened;
}

#define CROSSDOCK_CALL(name, ...) check(driver().name##_function(__VA_ARGS__), #name)

void check(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    driver().cuGetErrorString_function(result, &text);
    fail(ncclUnhandledCudaError, "{} failed: {}", call, text != nullptr ? text : "an unknown error");
}

// Makes the communicator's CUDA context current on the calling thread.
class InContext {
  public:
    explicit InContext(CUcontext context) {
        CUcontext current = nullptr;
        CROSSDOCK_CALL(cuCtxGetCurrent, &current);
        if (current == context) return;
        CROSSDOCK_CALL(cuCtxPushCurrent, context);
        pushed_ = true;
    }
    ~InContext() {
        CUcontext popped = nullptr;
        if (pushed_) driver().cuCtxPopCurrent_function(&popped);
    }
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;

  private:
    bool pushed_ = false;
};

CUdeviceptr address_of(const void* device) { return reinterpret_cast<CUdeviceptr>(device); }

// One direction: a stream, its staging memory, and a word that the stream writes on completion of steps.
class Direction {
  public:
    Direction() : Direction(nullptr) {  // delegates, so that the destructor runs if this body throws
        int least = 0;
        int greatest = 0;
        CROSSDOCK_CALL(cuCtxGetStreamPriorityRange, &least, &greatest);
        CROSSDOCK_CALL(cuStreamCreateWithPriority, &stream_, CU_STREAM_NON_BLOCKING, greatest);
        void* memory = nullptr;
        CROSSDOCK_CALL(cuMemHostAlloc, &memory, kStagingBytes + kWordsBytes,
                       CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
        memory_ = static_cast<std::byte*>(memory);
        done_ = new (memory_ + kStagingBytes) uint64_t{0};
        CROSSDOCK_CALL(cuMemHostGetDevicePointer, &done_device_, done_, 0);
    }
    ~Direction() {
        if (stream_ != nullptr) driver().cuStreamDestroy_function(stream_);
        if (memory_ != nullptr) driver().cuMemFreeHost_function(memory_);
    }
    Direction(const Direction&) = delete;
    Direction& operator=(const Direction&) = delete;

    CUstream stream() const { return stream_; }
    std::span<std::byte> staging() const { return {memory_, kStagingBytes}; }
    uint64_t count_step() { return ++queued_; }

    // Call before queueing the copy of these bytes to the host; fills them with a mark that the copy overwrites.
    void watch(std::byte* staging, uint64_t bytes) {
        if (bytes > kWatchedBytes || bytes % sizeof(uint64_t) != 0) return;
        std::span words(reinterpret_cast<uint64_t*>(staging), bytes / sizeof(uint64_t));
        const uint64_t mark = marks_();
        std::fill(words.begin(), words.end(), mark);
        watched_.push_back({queued_ + 1, words, mark});
    }

    // Queues a completion word only when a caller polls, once for many steps.
    uint64_t done(CUcontext context) {
        seen_ = std::max(seen_, std::atomic_ref(*done_).load(std::memory_order_acquire));
        while (!watched_.empty() && (watched_.front().step <= seen_ || has_come(watched_.front()))) {
            seen_ = std::max(seen_, watched_.front().step);
            watched_.pop_front();
            empty_polls_ = 0;
        }
        const bool is_watched =
            !watched_.empty() && watched_.front().step == seen_ + 1 && ++empty_polls_ < kMaxEmptyPolls;
        if (announced_ < queued_ && seen_ < queued_ && !is_watched) {
            const InContext here(context);
            CROSSDOCK_CALL(cuStreamWriteValue64, stream_, done_device_, queued_, CU_STREAM_WRITE_VALUE_DEFAULT);
            announced_ = queued_;
        }
        return seen_;
    }

  private:
    explicit Direction(CUstream none) : stream_(none) {}

    // A copy to the host, into words that all held the mark.
    struct Watched {
        uint64_t step;
        std::span<uint64_t> words;
        uint64_t mark;
    };

    // True if all earlier steps are done and no word holds the mark any more. (If a word of the source equals the mark,
    // the stream's word signals completion.)
    bool has_come(const Watched& copy) const {
        if (copy.step != seen_ + 1) return false;
        const bool has = std::all_of(copy.words.rbegin(), copy.words.rend(), [&](uint64_t& word) {
            return std::atomic_ref(word).load(std::memory_order_relaxed) != copy.mark;
        });
        std::atomic_thread_fence(std::memory_order_acquire);
        return has;
    }

    CUstream stream_ = nullptr;
    std::byte* memory_ = nullptr;
    uint64_t* done_ = nullptr;
    CUdeviceptr done_device_ = 0;
    uint64_t queued_ = 0;
    uint64_t announced_ = 0;
    uint64_t seen_ = 0;  // number of steps known to be done
    std::deque<Watched> watched_;
    uint32_t empty_polls_ = 0;  // of the first watched copy
    std::mt19937_64 marks_{std::random_device{}()};
};

// Owned device memory.
class Scratch {
  public:
    explicit Scratch(uint64_t bytes) { CROSSDOCK_CALL(cuMemAlloc, &address_, bytes); }
    ~Scratch() { driver().cuMemFree_function(address_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void* data() const { return reinterpret_cast<void*>(address_); }

  private:
    CUdeviceptr address_ = 0;
};

// Allows allocations while another stream is being captured.
class RelaxedCapture {
  public:
    RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode_function(&mode_); }
    ~RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode_function(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

class CudaMemory : public network::DeviceMemory {
  public:
    // context: the current one.
    explicit CudaMemory(CUcontext context) : context_(context) { warm_up(); }
    // Runs when the communicator is destroyed, on any thread. Freeing device and pinned memory waits for running
    // kernels, as NCCL's own frees do.
    ~CudaMemory() override {
        try {
            const InContext here(context_);
            const RelaxedCapture relaxed;
            parts_.reset();
        } catch (const Error&) {
            // The context may be destroyed at process exit, and its memory with it.
            static_cast<void>(parts_.release());
        }
    }
    CudaMemory(const CudaMemory&) = delete;
    CudaMemory& operator=(const CudaMemory&) = delete;

    std::span<std::byte> staging_in() override { return parts_->in.staging(); }
    std::span<std::byte> staging_out() override { return parts_->out.staging(); }

    uint64_t copy_in(void* device, const std::byte* staging, uint64_t bytes) override {
        const InContext here(context_);
        CROSSDOCK_CALL(cuMemcpyHtoDAsync, address_of(device), staging, bytes, parts_->in.stream());
        return parts_->in.count_step();
    }

    // The default write has a memory barrier before it, so a reader of the word sees the bytes.
    uint64_t write_word(void* device, uint64_t value) override {
        const InContext here(context_);
        CROSSDOCK_CALL(cuStreamWriteValue64, parts_->in.stream(), address_of(device), value,
                       CU_STREAM_WRITE_VALUE_DEFAULT);
        return parts_->in.count_step();
    }

    uint64_t read_word(std::byte* staging, const void* device) override {
        return queue_copy_to_host(parts_->in, staging, device, sizeof(uint64_t));
    }

    uint64_t copy_out(std::byte* staging, const void* device, uint64_t bytes) override {
        return queue_copy_to_host(parts_->out, staging, device, bytes);
    }

    uint64_t done_in() override { return parts_->in.done(context_); }
    uint64_t done_out() override { return parts_->out.done(context_); }

  private:
    uint64_t queue_copy_to_host(Direction& direction, std::byte* staging, const void* device, uint64_t bytes) {
        const InContext here(context_);
        direction.watch(staging, bytes);
        CROSSDOCK_CALL(cuMemcpyDtoHAsync, staging, address_of(device), bytes, direction.stream());
        return direction.count_step();
    }

    // Makes each call once, in sizes that CUDA may treat differently, so that CUDA's first-use initialization does not
    // happen while kernels wait for copies.
    void warm_up() {
        void* device = parts_->scratch.data();
        uint64_t last_in = 0;
        uint64_t last_out = 0;
        for (const uint64_t bytes : {uint64_t{sizeof(uint64_t)}, uint64_t{4096}, kLargestWarmUp}) {
            copy_in(device, parts_->in.staging().data(), bytes);
            write_word(device, 0);
            last_out = copy_out(parts_->out.staging().data(), device, bytes);
        }
        last_in = read_word(parts_->in.staging().data(), device);
        while (done_in() < last_in || done_out() < last_out) sched_yield();
    }

    static constexpr uint64_t kLargestWarmUp = uint64_t{1} << 20;

    struct Parts {
        Direction in;
        Direction out;
        Scratch scratch{kLargestWarmUp};  // kept to the end, since freeing it waits for kernels
    };

    CUcontext context_;
    std::unique_ptr<Parts> parts_ = std::make_unique<Parts>();
};

}  // namespace

std::unique_ptr<network::DeviceMemory> make_device_memory() {
    if (!driver().is_complete) return nullptr;
    CUcontext context = nullptr;
    if (driver().cuCtxGetCurrent_function(&context) != CUDA_SUCCESS || context == nullptr) return nullptr;
    const RelaxedCapture relaxed;
    return std::make_unique<CudaMemory>(context);
}

}  // namespace crossdock::plugin
