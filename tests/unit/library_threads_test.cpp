// SPDX-License-Identifier: Apache-2.0
// The library's own threads: the program's signals are not for them, but those of their own faults are; a system that
// starts none is an error.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/error.h"
#include "core/process.h"
#include "crossdock.h"
#include "crossdock/device/entry.hpp"
#include "runtime/cpu/sanitizer.h"

namespace crossdock {
namespace {

std::string status_of(const std::filesystem::path& task, const std::string& name) {
    std::ifstream status(task / "status");
    for (std::string word; status >> word;) {
        if (word == name && status >> word) return word;
    }
    return {};
}

bool blocks(const std::filesystem::path& task, int signal) {
    return (std::strtoull(status_of(task, "SigBlk:").c_str(), nullptr, 16) >> (signal - 1) & 1) != 0;
}

// That of a device communicator.
TEST(LibraryThreads, TheProxyGetsNoSignalsButItsOwnFaults) {
#if defined(CROSSDOCK_TSAN)
    GTEST_SKIP() << "ThreadSanitizer has a thread of its own";
#endif
    ncclComm_t comm = nullptr;
    ASSERT_EQ(crossdockCommInitAll(&comm, 1), ncclSuccess);
    crossdockDevCommNeeds needs = {};
    needs.contexts = needs.signals = needs.connection = 1;
    crossdockDevCommView view = {};
    setenv("NCCL_GIN_TYPE", "2", 1);
    ASSERT_EQ(crossdockDevCommCreate(comm, &needs, &view), ncclSuccess) << crossdockGetLastError();
    unsetenv("NCCL_GIN_TYPE");
    int num_others = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        if (task.path().filename() == std::to_string(gettid())) {
            EXPECT_FALSE(blocks(task, SIGUSR1)) << "the program's thread";
        } else {
            // Before its first sleep the C library may still block all signals.
            while (status_of(task, "State:") == "R") std::this_thread::yield();
            EXPECT_TRUE(blocks(task, SIGUSR1));
            EXPECT_FALSE(blocks(task, SIGSEGV)) << "the program's handler would not learn of a fault";
            ++num_others;
        }
    }
    EXPECT_EQ(num_others, 1);
    EXPECT_EQ(crossdockDevCommDestroy(comm, view.id), ncclSuccess);
    EXPECT_EQ(crossdockCommDestroy(comm), ncclSuccess);
}

TEST(LibraryThreads, AreMissedWithAMessage) {
#if defined(CROSSDOCK_ASAN) || defined(CROSSDOCK_TSAN)
    GTEST_SKIP() << "the sanitizer needs memory of its own";
#endif
    const pid_t child = fork();
    if (child == 0) {
        // No memory for a stack, and one of an earlier thread is too small.
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, size_t{64} << 20);
        pthread_setattr_default_np(&attributes);
        const rlimit none{0, 0};
        setrlimit(RLIMIT_AS, &none);
        bool is_told = false;
        try {
            start_thread([] {}).join();
        } catch (const Error& error) {
            is_told = error.code() == ncclSystemError;
        }
        sigset_t after;
        pthread_sigmask(SIG_SETMASK, nullptr, &after);
        _exit(is_told && sigismember(&after, SIGUSR1) == 0 ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace crossdock
