// SPDX-License-Identifier: Apache-2.0
// A thread that only ThreadSanitizer sees: a warp's kernel, a warp's asynchronous copies, a link of the simulated
// network. One real thread does all their work, but only what kernels do orders it, so a missing barrier or wait shows
// as a data race. Work of executors in between belongs to the real thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "runtime/cpu/sanitizer.h"

namespace crossdock::cpu {

#if defined(CROSSDOCK_TSAN)

// A function that starts as one thread and ends as another must not be instrumented.
#if defined(__clang__)
#define CROSSDOCK_UNSEEN __attribute__((noinline, disable_sanitizer_instrumentation))
#else
#define CROSSDOCK_UNSEEN __attribute__((noinline, no_sanitize("thread")))
#endif

extern "C" {
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
uint64_t __tsan_atomic64_fetch_add(volatile uint64_t* word, uint64_t value, int order);
uint64_t __tsan_atomic64_load(const volatile uint64_t* word, int order);
void __tsan_atomic64_store(volatile uint64_t* word, uint64_t value, int order);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

// Switches the detection of the current thread's accesses on or off.
inline void watch(bool does) {
    if (does) {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    } else {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
}

class VirtualThread {
  public:
    VirtualThread() : fiber_(__tsan_create_fiber(0)) {}
    ~VirtualThread() { __tsan_destroy_fiber(fiber_); }
    VirtualThread(const VirtualThread&) = delete;
    VirtualThread& operator=(const VirtualThread&) = delete;

    // From now on the caller runs as this thread, ordered after what was released at `launch`.
    CROSSDOCK_UNSEEN void begin(const void* launch) {
        caller_ = __tsan_get_current_fiber();
        switch_to(fiber_);
        __tsan_acquire(const_cast<void*>(launch));
    }
    // Switches back to the caller, whose next accesses are ordered after all of this thread's.
    CROSSDOCK_UNSEEN void end() {
        leave();
        acquire();
    }
    // Between begin() and end(): until resume(), accesses belong to the caller, unordered with this thread. They are
    // not checked, because they use the same stack.
    CROSSDOCK_UNSEEN void pause() {
        switch_to(caller_);
        watch(false);
    }
    CROSSDOCK_UNSEEN void resume() {
        watch(true);
        switch_to(fiber_);
    }

    // Order the calling thread's earlier accesses before this thread's later ones, or the other way round.
    CROSSDOCK_UNSEEN void release() { __tsan_release(this); }
    CROSSDOCK_UNSEEN void acquire() { __tsan_acquire(this); }

    // Accesses of this thread, ordered only by release() and acquire().
    CROSSDOCK_UNSEEN void read(const void* source, size_t bytes) {
        visit();
        __tsan_read_range(const_cast<void*>(source), bytes);
        leave();
    }
    CROSSDOCK_UNSEEN void write(void* target, size_t bytes) {
        visit();
        __tsan_write_range(target, bytes);
        leave();
    }
    CROSSDOCK_UNSEEN uint64_t load(const uint64_t* word) {
        visit();
        const uint64_t value = __tsan_atomic64_load(word, __ATOMIC_RELAXED);
        leave();
        return value;
    }
    CROSSDOCK_UNSEEN void store_release(uint64_t* word, uint64_t value) {
        visit();
        __tsan_atomic64_store(word, value, __ATOMIC_RELEASE);
        leave();
    }
    CROSSDOCK_UNSEEN void add_release(uint64_t* word, uint64_t value) {
        visit();
        __tsan_atomic64_fetch_add(word, value, __ATOMIC_RELEASE);
        leave();
    }

  private:
    CROSSDOCK_UNSEEN void visit() {
        caller_ = __tsan_get_current_fiber();
        enter();
    }
    CROSSDOCK_UNSEEN void enter() {
        switch_to(fiber_);
        acquire();
    }
    CROSSDOCK_UNSEEN void leave() {
        release();
        switch_to(caller_);
    }
    CROSSDOCK_UNSEEN static void switch_to(void* fiber) {
        __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
    }

    void* fiber_;
    void* caller_ = nullptr;
};

// An object through which threads synchronize: an acquire is ordered after all earlier releases.
inline void release(const void* place) { __tsan_release(const_cast<void*>(place)); }
inline void acquire(const void* place) { __tsan_acquire(const_cast<void*>(place)); }

#else

#define CROSSDOCK_UNSEEN

class VirtualThread {
  public:
    void begin(const void*) {}
    void end() {}
    void pause() {}
    void resume() {}
    void release() {}
    void acquire() {}
    void read(const void*, size_t) {}
    void write(void*, size_t) {}
    uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
    void store_release(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
    void add_release(uint64_t* word, uint64_t value) { __atomic_fetch_add(word, value, __ATOMIC_RELEASE); }
};

inline void release(const void*) {}
inline void acquire(const void*) {}
inline void watch(bool) {}

#endif

// Accesses in this scope are not checked for races.
class Unwatched {
  public:
    Unwatched() { watch(false); }
    ~Unwatched() { watch(true); }
    Unwatched(const Unwatched&) = delete;
    Unwatched& operator=(const Unwatched&) = delete;
};

// A copy whose accesses are reported as those of virtual threads.
inline void copy_unwatched(void* target, const void* source, size_t bytes) {
    const Unwatched copy;
    std::memcpy(target, source, bytes);
}

// Runs a kernel as that thread, or as the calling one if it is null ...
class RunAs {
  public:
    CROSSDOCK_UNSEEN RunAs(VirtualThread* thread, const void* launch) : thread_(thread) {
        if (thread_ != nullptr) thread_->begin(launch);
    }
    CROSSDOCK_UNSEEN ~RunAs() {
        if (thread_ != nullptr) thread_->end();
    }
    RunAs(const RunAs&) = delete;
    RunAs& operator=(const RunAs&) = delete;

  private:
    VirtualThread* thread_;
};

// ... except for its executor's work.
class ExecutorsWork {
  public:
    CROSSDOCK_UNSEEN explicit ExecutorsWork(VirtualThread* kernel) : kernel_(kernel) {
        if (kernel_ != nullptr) kernel_->pause();
    }
    CROSSDOCK_UNSEEN ~ExecutorsWork() {
        if (kernel_ != nullptr) kernel_->resume();
    }
    ExecutorsWork(const ExecutorsWork&) = delete;
    ExecutorsWork& operator=(const ExecutorsWork&) = delete;

  private:
    VirtualThread* kernel_;
};

#undef CROSSDOCK_UNSEEN

}  // namespace crossdock::cpu
