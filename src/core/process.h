// SPDX-License-Identifier: Apache-2.0
// fork(): a child process has copies of its parent's objects, but not the threads, connections and seats behind them,
// which stay the parent's.
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

// Where an object was made.
class MakerProcess {
  public:
    MakerProcess();
    // Error with ncclInvalidUsage that names both processes, if this is a forked child of the one where it was made.
    // subject: "comm 0x..".
    void expect_this(const std::string& subject) const;
    bool is_this() const;

  private:
    unsigned generation_;
    pid_t process_;
};

// Calls a function that makes an object of the process at its first call, when the library is loaded. Made later, by
// one thread while another forks, a function's static variable would stay locked in the child.
struct MadeAtLoad {
    template <typename Make>
    explicit MadeAtLoad(Make make) {
        make();
    }
};

// A mutex that no thread holds in a forked child, where the thread that held it would be missing. It must not be held
// while another one is taken, made or ended.
class ForkSafeMutex {
  public:
    // in_child: what a forked child does at once with what the mutex guards, before fork() returns. It calls only
    // functions that are async-signal-safe.
    explicit ForkSafeMutex(std::function<void()> in_child = {});
    ~ForkSafeMutex();
    ForkSafeMutex(const ForkSafeMutex&) = delete;
    ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }
    void lock_shared() { mutex_.lock_shared(); }
    void unlock_shared() { mutex_.unlock_shared(); }

    void renew() noexcept;  // in the child: releases it, whichever thread held it

  private:
    std::shared_mutex mutex_;
    std::function<void()> in_child_;
};

// The one Object that its users in this process share while there are any; a forked child, which has none of its
// parent's threads, makes its own. It is stopped at the process's end, before what it uses is torn down. Object has
// stop() and is_inherited(). state() is to be made at load.
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
            // In a child the thread that is missing may hold its mutex, or wait for its condition variable for ever.
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

// A thread of the library, which gets none of the program's signals but those of its own faults. Error with
// ncclSystemError if the system starts no more threads.
std::thread start_thread(std::function<void()> body);

}  // namespace crossdock
