// SPDX-License-Identifier: Apache-2.0
// Device memory through CUDA's driver, opened at run time. While kernels wait for what is done here, nothing may be
// called that waits for kernels: so all memory and streams are made with the communicator, and afterwards there are
// only asynchronous copies, and writes of words by the stream itself. Those also say what is done, no event is asked; a
// few bytes that come to the host say it themselves.
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
constexpr uint64_t kWordsBytes = 4096;  // apart, since the processor polls it
constexpr uint64_t kWatchedBytes = 8192;
constexpr uint32_t kVainLooks = 512;  // at a watched copy, before the stream is asked

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

// The communicator's CUDA context, on whatever thread calls.
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

// One direction: a stream, its staging memory, and a word that the stream writes when steps are done.
class Direction {
  public:
    Direction() : Direction(nullptr) {  // from here on what was made is freed, also where the rest fails
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

    // Before a copy of those bytes to the host, which is the next step.
    void watch(std::byte* staging, uint64_t bytes) {
        if (bytes > kWatchedBytes || bytes % sizeof(uint64_t) != 0) return;
        std::span words(reinterpret_cast<uint64_t*>(staging), bytes / sizeof(uint64_t));
        const uint64_t mark = marks_();
        std::fill(words.begin(), words.end(), mark);
        watched_.push_back({queued_ + 1, words, mark});
    }

    // The stream is asked to tell only when somebody wants to know: once for many steps.
    uint64_t done(CUcontext context) {
        seen_ = std::max(seen_, std::atomic_ref(*done_).load(std::memory_order_acquire));
        while (!watched_.empty() && (watched_.front().step <= seen_ || has_come(watched_.front()))) {
            seen_ = std::max(seen_, watched_.front().step);
            watched_.pop_front();
            vain_looks_ = 0;
        }
        const bool is_watched = !watched_.empty() && watched_.front().step == seen_ + 1 && ++vain_looks_ < kVainLooks;
        if (announced_ < queued_ && seen_ < queued_ && !is_watched) {
            const InContext here(context);
            CROSSDOCK_CALL(cuStreamWriteValue64, stream_, done_device_, queued_, CU_STREAM_WRITE_VALUE_DEFAULT);
            announced_ = queued_;
        }
        return seen_;
    }

  private:
    explicit Direction(CUstream none) : stream_(none) {}

    // A copy to the host whose every word was the mark before.
    struct Watched {
        uint64_t step;
        std::span<uint64_t> words;
        uint64_t mark;
    };

    // All steps before it have been seen, and no word is the mark any more. (A word of the source may be the mark; then
    // the stream tells.)
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
    uint64_t seen_ = 0;  // so many steps are done
    std::deque<Watched> watched_;
    uint32_t vain_looks_ = 0;  // at the first
    std::mt19937_64 marks_{std::random_device{}()};
};

// Device memory, owned.
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

// A capture on another stream does not concern what is made and freed while it lives.
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
    // In that context, which is current.
    explicit CudaMemory(CUcontext context) : context_(context) { warm_up(); }
    // With the communicator, on whatever thread. Freeing memory of the device or of the host waits for kernels that
    // run, as whatever else NCCL frees then does.
    ~CudaMemory() override {
        try {
            const InContext here(context_);
            const RelaxedCapture relaxed;
            parts_.reset();
        } catch (const Error&) {
            // The context can be gone when a process ends; then so is all of this.
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

    // With a barrier before it: whoever sees the word sees the bytes.
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

    // Each call once, in sizes that CUDA may treat differently: what it prepares at a call's first use is prepared now,
    // before kernels wait for these copies.
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
