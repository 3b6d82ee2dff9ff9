// SPDX-License-Identifier: Apache-2.0
//
// crossdock.Memory and crossdock.Window: symmetric memory of CPU communicators.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "communicator.h"

namespace crossdock::python {

// Zeroed memory of the library, 4096-byte aligned; exported through the buffer protocol as bytes.
class Memory {
  public:
    explicit Memory(size_t size);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    void* data_ = nullptr;
    size_t size_;
    ForkGuard fork_guard_;
};

class Window {
  public:
    Window(std::shared_ptr<CommunicatorState> communicator, ncclWindow_t window, nanobind::object memory)
        : communicator_(std::move(communicator)), window_(window), memory_(std::move(memory)) {}

    Window(Window&& other) noexcept
        : communicator_(std::move(other.communicator_)),
          window_(std::exchange(other.window_, nullptr)),
          memory_(std::move(other.memory_)) {}
    // Peers may still write into the memory of a window that was not closed, so it stays.
    ~Window() {
        if (window_ != nullptr) memory_.release();
    }

    // NULL once it is deregistered.
    ncclWindow_t get() const { return window_; }
    void close();

  private:
    std::shared_ptr<CommunicatorState> communicator_;
    ncclWindow_t window_;
    nanobind::object memory_;
};

Window register_window(Communicator& communicator, nanobind::handle memory);

// From a Window, or from a number that is an ncclWindow_t. InvalidUsage: the Window is closed.
ncclWindow_t window_handle_of(nanobind::handle window, const char* name);

void bind_windows(nanobind::module_& module);

}  // namespace crossdock::python
