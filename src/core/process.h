// SPDX-License-Identifier: Apache-2.0
// fork(): a child process has copies of its parent's objects, but not their threads and connections, which remain the
// parent's.
#pragma once

#include <sys/types.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>

namespace crossdock {

// The process in which an object was made.
class MakerProcess {
  public:
    MakerProcess();
    // Throws ncclInvalidUsage that names both processes, if this is a forked child of the one that made the object.
    // subject: "comm 0x..".
    void expect_this(const std::string& subject) const;
    bool is_this() const;

  private:
    unsigned generation_;
    pid_t process_;
};

// Calls a function that makes a static object when the library is loaded. If one thread made it later while another
// forks, the static variable's guard would stay locked in the child.
struct MadeAtLoad {
    template <typename Make>
    explicit MadeAtLoad(Make make) {
        make();
    }
};

// A mutex that is free in a forked child, where the thread that held it does not exist. It must not be held while
// another one is locked, made or destroyed.
class ForkSafeMutex {
  public:
    // in_child: runs in a forked child before fork() returns, to reset what the mutex guards. Must be
    // async-signal-safe.
    explicit ForkSafeMutex(std::function<void()> in_child = {});
    ~ForkSafeMutex();
    ForkSafeMutex(const ForkSafeMutex&) = delete;
    ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }
    void lock_shared() { mutex_.lock_shared(); }
    void unlock_shared() { mutex_.unlock_shared(); }

    void renew() noexcept;  // in the child: releases the mutex, whichever thread held it

  private:
    std::shared_mutex mutex_;
    std::function<void()> in_child_;
};

// One Object that its users in this process share, destroyed with the last of them; a forked child, which has none of
// its parent's threads, makes its own. It is stopped when the process exits, before what it uses is destroyed. Object
// has stop() and is_inherited(). Call state() at load (MadeAtLoad).
template <typename Object>
class SharedInProcess {
  public:
    struct State {
        ForkSafeMutex mutex;
        std::weak_ptr<Object> object;
        bool stops_at_exit = false;
    };
    static State& state() {
        static auto* instance = new State;
        return *instance;
    }

    static std::shared_ptr<Object> get() {
        const std::lock_guard lock(state().mutex);
        std::shared_ptr<Object> object = state().object.lock();
        if (object == nullptr || object->is_inherited()) {
            // In a child, the missing thread may hold the object's mutex or wait for its condition variable for ever.
            state().object = object = std::shared_ptr<Object>(new Object, [](Object* last) {
                if (!last->is_inherited()) delete last;
            });
        }
        if (!state().stops_at_exit) state().stops_at_exit = std::atexit(stop) == 0;
        return object;
    }

  private:
    static void stop() {
        if (const auto object = state().object.lock()) object->stop();
    }
};

// Starts a thread of the library, which gets no signals but those of its own faults. Throws ncclSystemError if the
// system starts no more threads.
std::thread start_thread(std::function<void()> body);

}  // namespace crossdock
