// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <dlfcn.h>

#include <unordered_map>
#include <vector>

namespace crossdock::python {
namespace {

// Functions of the driver in the types that they have in C: streams and events are pointers, as streams of the runtime
// are, and 0 is success.
struct Driver {
    int (*create_event)(void** event, unsigned int flags) = nullptr;
    int (*record)(void* event, cudaStream_t stream) = nullptr;
    int (*wait)(cudaStream_t stream, void* event, unsigned int flags) = nullptr;

    Driver() {
        void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        if (driver == nullptr) return;
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

// By device; they live as long as the process.
std::vector<void*>& free_events(int device) {
    static auto* events = new std::unordered_map<int, std::vector<void*>>;
    return (*events)[device];
}

}  // namespace

bool has_events() {
    const Driver& driver = Driver::get();
    return driver.create_event != nullptr && driver.record != nullptr && driver.wait != nullptr;
}

void* record_event(int device, cudaStream_t stream) {
    const Driver& driver = Driver::get();
    std::vector<void*>& free = free_events(device);
    void* event = nullptr;
    if (!free.empty()) {
        event = free.back();
        free.pop_back();
    } else if (driver.create_event(&event, kWithoutTiming) != 0) {
        return nullptr;
    }
    if (driver.record(event, stream) == 0) return event;
    give_back_event(device, event);
    return nullptr;
}

void give_back_event(int device, void* event) { free_events(device).push_back(event); }

bool wait_for_event(cudaStream_t stream, void* event) { return Driver::get().wait(stream, event, 0) == 0; }

bool order_streams(int device, cudaStream_t waiting, cudaStream_t before) {
    void* event = record_event(device, before);
    if (event == nullptr) return false;
    const bool waits = wait_for_event(waiting, event);
    give_back_event(device, event);
    return waits;
}

}  // namespace crossdock::python
