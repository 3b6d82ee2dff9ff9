// SPDX-License-Identifier: Apache-2.0
#include "core/process.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "core/error.h"
#include "runtime/cpu/sanitizer.h"

#if defined(CROSSDOCK_TSAN)
// ThreadSanitizer annotation: a re-created mutex is not held.
extern "C" void AnnotateRWLockReleased(const char* file, int line, const volatile void* mutex, long is_writer);
#endif

namespace crossdock {
namespace {

// The process's fork handlers. Never destroyed: threads may fork while the process exits.
struct Forks {
    unsigned generation = 0;  // grows by one in every child
    std::mutex mutex;         // of the list
    std::vector<ForkSafeMutex*> mutexes;
};

Forks& forks();

void before_fork() {
    forks().mutex.lock();
    for (ForkSafeMutex* mutex : forks().mutexes) mutex->lock();
}

void in_parent() {
    for (ForkSafeMutex* mutex : forks().mutexes) mutex->unlock();
    forks().mutex.unlock();
}

void in_child() {
    ++forks().generation;
    for (ForkSafeMutex* mutex : forks().mutexes) mutex->renew();
    forks().mutex.unlock();
}

Forks& forks() {
    static Forks& instance = []() -> Forks& {
        auto* made = new Forks;
        pthread_atfork(before_fork, in_parent, in_child);
        return *made;
    }();
    return instance;
}

}  // namespace

MakerProcess::MakerProcess() : generation_(forks().generation), process_(getpid()) {}

bool MakerProcess::is_this() const { return generation_ == forks().generation; }

void MakerProcess::expect_this(const std::string& subject) const {
    require(
        is_this(), ncclInvalidUsage,
        "{} was made by process {} before fork(): this process, {}, must make its own, and cannot use or destroy it",
        subject, process_, getpid());
}

ForkSafeMutex::ForkSafeMutex(std::function<void()> in_child) : in_child_(std::move(in_child)) {
    const std::lock_guard lock(forks().mutex);
    forks().mutexes.push_back(this);
}

ForkSafeMutex::~ForkSafeMutex() {
    const std::lock_guard lock(forks().mutex);
    std::erase(forks().mutexes, this);
}

// The C library does not let a child unlock what its parent's thread has locked.
void ForkSafeMutex::renew() noexcept {
#if defined(CROSSDOCK_TSAN)
    AnnotateRWLockReleased(__FILE__, __LINE__, mutex_.native_handle(), 1);
#endif
    new (&mutex_) std::shared_mutex;
    if (in_child_) in_child_();
}

std::thread start_thread(std::function<void()> body) {
    struct Masked {
        sigset_t before;
        Masked() {
            sigset_t masked;
            sigfillset(&masked);
            // A thread's own faults: if masked, they end the process without calling the program's handler.
            for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&masked, fault);
            pthread_sigmask(SIG_SETMASK, &masked, &before);
        }
        ~Masked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    } masked;
    try {
        return std::thread(std::move(body));
    } catch (const std::system_error& error) {
        fail(ncclSystemError, "cannot start a thread of the library: {}", error.what());
    }
}

}  // namespace crossdock
