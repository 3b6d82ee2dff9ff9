// SPDX-License-Identifier: Apache-2.0
// A fiber: a function with a stack of its own that a scheduler resumes and that suspends itself, all on one thread.
#pragma once

#include <cstddef>
#include <exception>

#include "device/platform.h"
#include "runtime/cpu/virtual_thread.h"

namespace crossdock::cpu {

inline constexpr size_t kWarpStackBytes = 256 << 10;   // of Crossdock's own kernels
inline constexpr size_t kProgramStackBytes = 1 << 20;  // for a rank's whole program

class Fiber {
  public:
    // Takes a stack with a guard below it from the thread's pool. Throws ncclSystemError if there is no memory.
    explicit Fiber(size_t stack_bytes);
    // The body must have returned, or never have started: its stack is not unwound.
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // The next resume() enters body(argument). The fiber must not be running. Does not allocate.
    void start(void (*body)(void*), void* argument);

    // Runs the body until it suspends or returns. The state of C++ exceptions is kept per fiber, so a body may suspend
    // inside a catch block or a destructor.
    void resume();

    // Called by the body: returns to its resumer.
    void suspend();

    bool is_finished() const { return finished_; }
    size_t stack_bytes() const { return stack_bytes_; }
    bool is_in_guard(const void* address) const;

    // The fiber whose body runs in the calling thread; null: none.
    static const Fiber* running();

    // Returns the exception that the body threw, once; null: none.
    std::exception_ptr take_exception();

    // The thread of a kernel that runs as the body, for ThreadSanitizer.
    VirtualThread& kernel() { return kernel_; }

  private:
    struct ExceptionState {  // the C++ runtime's per-thread record of exceptions under way
        void* caught = nullptr;
        unsigned int uncaught = 0;
    };

    void loop();
    void arrive();

    std::byte* stack_ = nullptr;
    size_t stack_bytes_;
    void* context_ = nullptr;         // where the fiber continues
    void* caller_context_ = nullptr;  // where the resumer continues
    void (*body_)(void*) = nullptr;
    void* argument_ = nullptr;
    bool finished_ = true;
    std::exception_ptr exception_;
    ExceptionState exception_state_;

    // For the sanitizers, which must know every change of stack; unused otherwise.
    void* fake_stack_ = nullptr;
    const void* caller_stack_ = nullptr;
    size_t caller_stack_bytes_ = 0;
    void* tsan_fiber_ = nullptr;
    void* tsan_caller_ = nullptr;
    VirtualThread kernel_;

    friend struct FiberEntry;
};

}  // namespace crossdock::cpu
