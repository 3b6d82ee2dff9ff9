// SPDX-License-Identifier: Apache-2.0
#include "bench/kernel_clock.h"

#if __has_include(<cupti.h>)
#include <cupti.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "bench/gate.h"
#include "tools/common/nccl_library.h"
#endif

namespace crossdock::bench {

#if __has_include(<cupti.h>)

namespace {

constexpr const char* kCupti = "libcupti.so.13";

// CUPTI keeps one record of all GPUs and threads of the process, and hands it out through functions without context.
class Recorder {
  public:
    static Recorder& instance() {
        static Recorder recorder;
        return recorder;
    }

    const std::string& why_absent() const { return why_absent_; }

    void start() {
        const std::lock_guard lock(calls_);
        if (num_clocks_++ == 0) {
            check(enable_(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "cuptiActivityEnable");
        }
    }
    void stop() {
        const std::lock_guard lock(calls_);
        if (--num_clocks_ == 0) {
            disable_(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
        }
    }

    uint32_t stream_id(cudaStream_t stream) {
        uint32_t id = 0;
        check(get_stream_id_(nullptr, stream, 0, &id), "cuptiGetStreamIdEx");
        return id;
    }

    std::vector<KernelRecord> take(uint32_t device, uint32_t stream, size_t num_meetings) {
        // A buffer is delivered once the times of all its kernels are in, which may be a little after their end.
        for (int attempt = 0;; ++attempt) {
            {
                const std::lock_guard lock(calls_);
                check(flush_(0), "cuptiActivityFlushAll");
            }
            {
                const std::lock_guard lock(records_mutex_);
                std::vector<KernelRecord>& records = records_[{device, stream}];
                const auto is_meeting = [](const KernelRecord& record) {
                    return record.kind == KernelRecord::Kind::kMeeting;
                };
                if (attempt == kAttempts ||
                    static_cast<size_t>(std::count_if(records.begin(), records.end(), is_meeting)) >= num_meetings) {
                    return std::exchange(records, {});
                }
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

  private:
    static constexpr size_t kBufferBytes = size_t{1} << 20;
    static constexpr int kAttempts = 500;

    Recorder() {
        void* library = dlopen(kCupti, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            why_absent_ = fmt::format("{} (its folder belongs into LD_LIBRARY_PATH)", dlerror());
            return;
        }
        const auto resolve = [&](const char* name, auto& function) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            if (function == nullptr) {
                why_absent_ = fmt::format("{} has no function {}", kCupti, name);
            }
        };
        decltype(&cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
        resolve("cuptiActivityRegisterCallbacks", register_callbacks);
        resolve("cuptiActivityEnable", enable_);
        resolve("cuptiActivityDisable", disable_);
        resolve("cuptiActivityFlushAll", flush_);
        resolve("cuptiActivityGetNextRecord", get_next_record_);
        resolve("cuptiGetStreamIdEx", get_stream_id_);
        if (why_absent_.empty()) {
            const CUptiResult result = register_callbacks(give_buffer, take_buffer);
            if (result != CUPTI_SUCCESS) {
                why_absent_ = fmt::format("cuptiActivityRegisterCallbacks failed with {}", static_cast<int>(result));
            }
        }
    }

    static void check(CUptiResult result, const char* call) {
        if (result != CUPTI_SUCCESS) {
            throw std::runtime_error(fmt::format("{} failed with {}", call, static_cast<int>(result)));
        }
    }

    static void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* max_num_records) {
        *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
        *size = *buffer != nullptr ? kBufferBytes : 0;
        *max_num_records = 0;
    }

    static void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid_bytes) {
        instance().read(buffer, valid_bytes);
        std::free(buffer);
    }

    void read(uint8_t* buffer, size_t valid_bytes) {
        const std::lock_guard lock(records_mutex_);
        CUpti_Activity* record = nullptr;
        while (get_next_record_(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
            if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL && record->kind != CUPTI_ACTIVITY_KIND_KERNEL) {
                continue;
            }
            const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
            const char* name = kernel->name != nullptr ? kernel->name : "";
            const auto kind = std::strstr(name, kMeetingKernel) != nullptr ? KernelRecord::Kind::kMeeting
                              : std::strstr(name, kStopKernel) != nullptr  ? KernelRecord::Kind::kStop
                                                                           : KernelRecord::Kind::kOperation;
            records_[{kernel->deviceId, kernel->streamId}].push_back({kind, kernel->start, kernel->end});
        }
    }

    std::string why_absent_;
    decltype(&cuptiActivityEnable) enable_ = nullptr;
    decltype(&cuptiActivityDisable) disable_ = nullptr;
    decltype(&cuptiActivityFlushAll) flush_ = nullptr;
    decltype(&cuptiActivityGetNextRecord) get_next_record_ = nullptr;
    decltype(&cuptiGetStreamIdEx) get_stream_id_ = nullptr;
    std::mutex calls_;
    int num_clocks_ = 0;
    std::mutex records_mutex_;
    std::map<std::pair<uint32_t, uint32_t>, std::vector<KernelRecord>> records_;  // by device and stream
};

class CuptiClock : public KernelClock {
  public:
    explicit CuptiClock(tools::Device& device) {
        int index = 0;
        tools::check_cuda(cudaGetDevice(&index), "cudaGetDevice");
        device_index_ = static_cast<uint32_t>(index);
        stream_id_ = Recorder::instance().stream_id(device.stream());
        Recorder::instance().start();
    }
    ~CuptiClock() override { Recorder::instance().stop(); }

    std::vector<KernelRecord> take(size_t num_meetings) override {
        std::vector<KernelRecord> records = Recorder::instance().take(device_index_, stream_id_, num_meetings);
        std::sort(records.begin(), records.end(),
                  [](const KernelRecord& a, const KernelRecord& b) { return a.start_ns < b.start_ns; });
        return records;
    }

  private:
    uint32_t device_index_ = 0;
    uint32_t stream_id_ = 0;
};

}  // namespace

std::unique_ptr<KernelClock> make_kernel_clock(tools::Device& device, std::string& why) {
    why = Recorder::instance().why_absent();
    return why.empty() ? std::make_unique<CuptiClock>(device) : nullptr;
}

#else

std::unique_ptr<KernelClock> make_kernel_clock(tools::Device&, std::string& why) {
    why = "ep_bench was built without CUPTI's header, cupti.h";
    return nullptr;
}

#endif

}  // namespace crossdock::bench
