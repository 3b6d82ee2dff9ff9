// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <dlfcn.h>

#include <cstdint>
#include <unordered_map>

namespace crossdock::python {
namespace {

// Functions of the driver in the types that they have in C: CUdeviceptr is an integer, streams and events are pointers,
// as streams of the runtime are, and 0 is success.
struct Driver {
    int (*copy)(uintptr_t target, uintptr_t source, size_t num_bytes, cudaStream_t stream) = nullptr;
    int (*create_event)(void** event, unsigned int flags) = nullptr;
    int (*record)(void* event, cudaStream_t stream) = nullptr;
    int (*wait)(cudaStream_t stream, void* event, unsigned int flags) = nullptr;

    Driver() {
        void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        if (driver == nullptr) return;
        find(driver, "cuMemcpyDtoDAsync_v2", copy);
        find(driver, "cuEventCreate", create_event);
        find(driver, "cuEventRecord", record);
        find(driver, "cuStreamWaitEvent", wait);
    }

    static const Driver& get() {
        static const Driver driver;
        return driver;
    }

  private:
    template <class Function>
    static void find(void* driver, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(driver, name));
    }
};

constexpr unsigned int kWithoutTiming = 2;  // CU_EVENT_DISABLE_TIMING

}  // namespace

bool copy_on_device(void* target, const void* source, size_t num_bytes, cudaStream_t stream) {
    if (num_bytes == 0) return true;
    const auto copy = Driver::get().copy;
    return copy != nullptr &&
           copy(reinterpret_cast<uintptr_t>(target), reinterpret_cast<uintptr_t>(source), num_bytes, stream) == 0;
}

bool order_streams(int device, cudaStream_t waiting, cudaStream_t before) {
    const Driver& driver = Driver::get();
    if (driver.create_event == nullptr || driver.record == nullptr || driver.wait == nullptr) return false;
    // A wait is for what was recorded when it began, so one event serves all calls. It lives as long as the process.
    static auto* events = new std::unordered_map<int, void*>;
    const auto found = events->find(device);
    void* event = found == events->end() ? nullptr : found->second;
    if (event == nullptr) {
        if (driver.create_event(&event, kWithoutTiming) != 0) return false;
        events->emplace(device, event);
    }
    return driver.record(event, before) == 0 && driver.wait(waiting, event, 0) == 0;
}

}  // namespace crossdock::python
