// SPDX-License-Identifier: Apache-2.0
// Ranks as processes: they find each other with the id only, share anonymous memory, detect a killed peer at once, and
// leave nothing behind.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/log.h"
#include "crossdock.h"
#include "crossdock/device/entry.hpp"
#include "fabric/communicator.h"
#include "fabric/cpu/mailbox.h"
#include "fabric/cpu/peer_process.h"
#include "runtime/cpu/memory_file.h"
#include "runtime/cpu/sanitizer.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
using RankProgram = std::function<bool(const ncclUniqueId& id, int rank)>;

// A child process that runs program and exits with whether it returned true.
pid_t fork_rank(const RankProgram& program, const ncclUniqueId& id, int rank) {
    const pid_t child = fork();
    if (child == 0) {
        bool is_good = false;
        try {
            is_good = program(id, rank);
            if (!is_good) std::fprintf(stderr, "rank %d failed; last error: %s\n", rank, last_error());
        } catch (const std::exception& error) {
            std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        }
        _exit(is_good ? 0 : 1);
    }
    return child;
}

bool succeeds(pid_t child) {
    int status = 0;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

ncclUniqueId make_id() {
    ncclUniqueId id;
    EXPECT_EQ(crossdockGetUniqueId(&id), ncclSuccess) << last_error();
    return id;
}

// The parent makes the id and is no rank.
void run_processes(int num_ranks, const RankProgram& program) {
    const ncclUniqueId id = make_id();
    std::vector<pid_t> children;
    for (int rank = 0; rank < num_ranks; ++rank) children.push_back(fork_rank(program, id, rank));
    for (pid_t child : children) EXPECT_TRUE(succeeds(child));
}

bool mentions(std::initializer_list<const char*> words) {
    for (const char* word : words) {
        if (std::strstr(last_error(), word) == nullptr) return false;
    }
    return true;
}

bool maps_no_shared_memory() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        if (line.find("memfd:crossdock") != std::string::npos) return false;
    }
    return true;
}

size_t num_descriptors() {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

std::set<std::string> names_in(const char* folder) {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path());
    return names;
}

TEST(Processes, GatherAndShareMemory) {
    constexpr int kRanks = 4;
    run_processes(kRanks, [](const ncclUniqueId& id, int rank) {
        ncclComm_t comm = nullptr;
        if (crossdockCommInitRank(&comm, kRanks, id, rank) != ncclSuccess) return false;
        std::vector<int> own(3000, rank);
        std::vector<int> all(own.size() * kRanks);
        if (crossdockCommAllGather(comm, own.data(), all.data(), own.size() * sizeof(int)) != ncclSuccess) return false;
        for (size_t i = 0; i < all.size(); ++i) {
            if (all[i] != static_cast<int>(i / own.size())) return false;
        }
        const auto communicator = communicator_of(comm);
        if (communicator->backend().name != std::string_view("processes")) return false;
        {
            const auto memory = communicator->allocate_symmetric(100'000, 100 * kSecond);
            for (int peer = 0; peer < kRanks; ++peer) {
                *memory->peers.at(peer, 99'990 + static_cast<uint64_t>(rank)) = std::byte(rank + 1);
            }
            communicator->barrier("written", 100 * kSecond);
            for (int peer = 0; peer < kRanks; ++peer) {
                if (memory->local[99'990 + peer] != std::byte(peer + 1)) return false;
            }
            communicator->barrier("read", 100 * kSecond);
        }
        return crossdockCommDestroy(comm) == ncclSuccess;
    });
}

TEST(Processes, WindowsLieInOneAllocation) {
    run_processes(2, [](const ncclUniqueId& id, int rank) {
        ncclComm_t comm = nullptr;
        void* memory = nullptr;
        if (crossdockCommInitRank(&comm, 2, id, rank) != ncclSuccess) return false;
        if (crossdockMemAlloc(&memory, 3 * 4096) != ncclSuccess) return false;
        auto* bytes = static_cast<std::byte*>(memory);
        ncclWindow_t window = nullptr;
        // Different places in the allocations.
        std::byte* part = bytes + 4096 * rank + 16;
        if (crossdockCommWindowRegister(comm, part, 4096, &window, 0) != ncclSuccess) return false;
        const WindowView view = communicator_of(comm)->window(window);
        if (view.local != part) return false;
        *view.peers.at(1 - rank, 4095) = std::byte(7 + rank);
        if (crossdockCommWindowDeregister(comm, window) != ncclSuccess) return false;
        if (part[4095] != std::byte(8 - rank)) return false;
        // What one rank cannot offer fails on both, at once.
        char on_stack[64];
        void* offered = rank == 0 ? static_cast<void*>(on_stack) : memory;
        if (crossdockCommWindowRegister(comm, offered, 64, &window, 0) != ncclInvalidArgument) return false;
        if (!mentions({rank == 0 ? "crossdockMemAlloc" : "rank 0"})) return false;
        if (crossdockCommWindowRegister(comm, bytes, 3 * 4096 + 1, &window, 0) != ncclInvalidArgument) return false;
        return crossdockCommBarrier(comm) == ncclSuccess && crossdockCommDestroy(comm) == ncclSuccess &&
               crossdockMemFree(memory) == ncclSuccess;
    });
}

// The way of an id that travels through a file: the other rank is an unrelated process that has inherited nothing.
TEST(Processes, AnIdTravelsAsBytes) {
    int pipe_ends[2];
    ASSERT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
    const auto join = [](const ncclUniqueId& id, int rank) {
        ncclComm_t comm = nullptr;
        return crossdockCommInitRank(&comm, 2, id, rank) == ncclSuccess && crossdockCommBarrier(comm) == ncclSuccess &&
               crossdockCommDestroy(comm) == ncclSuccess && maps_no_shared_memory();
    };
    const pid_t reader = fork();
    if (reader == 0) {
        ncclUniqueId id;
        _exit(read(pipe_ends[0], &id, sizeof(id)) == sizeof(id) && join(id, 1) ? 0 : 1);
    }
    const size_t num_before = num_descriptors();
    const ncclUniqueId id = make_id();
    ASSERT_EQ(write(pipe_ends[1], &id, sizeof(id)), static_cast<ssize_t>(sizeof(id)));
    EXPECT_TRUE(join(id, 0)) << last_error();
    EXPECT_TRUE(succeeds(reader));
    EXPECT_LE(num_descriptors(), num_before) << "the maker keeps nothing open after all have joined";
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    ncclComm_t comm = nullptr;
    const ncclResult_t result = crossdockCommInitRank(&comm, 2, id, 0);
    EXPECT_TRUE(result == ncclInvalidArgument || result == ncclSystemError) << last_error();
    EXPECT_EQ(comm, nullptr);
}

TEST(Processes, RefuseWrongIdsRanksAndSizes) {
    ncclUniqueId id{};
    ncclComm_t comm = nullptr;
    EXPECT_EQ(crossdockGetUniqueId(nullptr), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommInitRank(&comm, 2, id, 0), ncclInvalidArgument);
    EXPECT_TRUE(mentions({"crossdockGetUniqueId"})) << last_error();
    id = make_id();
    EXPECT_EQ(crossdockCommInitRank(nullptr, 2, id, 0), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommInitRank(&comm, 2, id, 2), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommInitRank(&comm, 2, id, -1), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommInitRank(&comm, 0, id, 0), ncclInvalidArgument);

    // A communicator of one rank is complete at once, and the id's maker keeps the id as long as it has not joined
    // itself.
    EXPECT_TRUE(succeeds(fork_rank(
        [](const ncclUniqueId& shared_id, int rank) {
            ncclComm_t own = nullptr;
            return crossdockCommInitRank(&own, 1, shared_id, rank) == ncclSuccess;
        },
        id, 0)));
    EXPECT_EQ(crossdockCommInitRank(&comm, 1, id, 0), ncclInvalidArgument);
    EXPECT_TRUE(mentions({"rank 0 is taken by process"})) << last_error();
    EXPECT_EQ(crossdockCommInitRank(&comm, 3, id, 1), ncclInvalidArgument);
    EXPECT_TRUE(mentions({"num_ranks is 3", "1 on the rank that joined first"})) << last_error();
    EXPECT_EQ(comm, nullptr);
}

TEST(Processes, JoiningIsBoundedAndNamesTheMissing) {
    setenv("CROSSDOCK_JOIN_TIMEOUT_MS", "50", 1);
    const ncclUniqueId id = make_id();
    ncclComm_t comm = nullptr;
    EXPECT_EQ(crossdockCommInitRank(&comm, 3, id, 1), ncclRemoteError);
    EXPECT_TRUE(mentions({"rank 1", "50 ms", "0, 2"})) << last_error();
    EXPECT_EQ(comm, nullptr);
    EXPECT_EQ(crossdockCommInitRank(&comm, 2, id, 1), ncclInvalidArgument);
    EXPECT_TRUE(mentions({"num_ranks is 2", "3"})) << last_error();
    unsetenv("CROSSDOCK_JOIN_TIMEOUT_MS");
}

// A process is identified by its start, too: one that ended is detected even if its number is in use again.
TEST(ProcessWatch, DetectsEndedProcesses) {
    const ProcessIdentity own = own_process();
    EXPECT_GT(own.start, 0u);
    EXPECT_FALSE(ProcessWatch(own).has_ended());
    EXPECT_TRUE(ProcessWatch({own.number, own.start + 1}).has_ended());
    const ProcessIdentity same = process_from(to_word(own));
    EXPECT_EQ(same.number, own.number);
    EXPECT_EQ(same.start, own.start);

    const pid_t child = fork();
    if (child == 0) pause();
    const ProcessWatch before({child, 0});
    EXPECT_FALSE(before.has_ended());
    kill(child, SIGKILL);
    siginfo_t info;
    ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
    EXPECT_TRUE(before.has_ended());
    EXPECT_TRUE(ProcessWatch({child, 0}).has_ended()) << "nobody has waited for it yet";
    EXPECT_FALSE(succeeds(child));
    EXPECT_TRUE(ProcessWatch({child, 0}).has_ended()) << "no process has the number";
}

// A process that can open no more files, or has closed all of its own, takes no process for ended.
TEST(ProcessWatch, NeedsNoDescriptor) {
    const ProcessIdentity own = own_process();
    const pid_t child = fork();
    if (child == 0) {
        const ProcessWatch before(own);
        close_range(3, ~0u, 0);
        if (before.has_ended()) _exit(1);
        const rlimit none{0, 0};
        setrlimit(RLIMIT_NOFILE, &none);
        const ProcessWatch watch(own);
        _exit(watch.has_ended() || before.has_ended() || own_process().start != 0 ? 2 : 0);
    }
    EXPECT_TRUE(succeeds(child));
}

// A limit of files' sizes is an error, where the system would send SIGXFSZ.
TEST(MemoryFile, ALimitOfFilesIsAnError) {
    const pid_t child = fork();
    if (child == 0) {
        const rlimit page{4096, 4096};
        setrlimit(RLIMIT_FSIZE, &page);
        void* memory = nullptr;
        const bool is_told = crossdockMemAlloc(&memory, 8192) == ncclSystemError && mentions({"8192", "ulimit -f"});
        _exit(is_told && crossdockMemAlloc(&memory, 4096) == ncclSuccess ? 0 : 1);
    }
    EXPECT_TRUE(succeeds(child));
}

// Nobody can make a file smaller that others have mapped, which would kill them, or larger.
TEST(MemoryFile, ItsSizeStaysAndItIsPrivate) {
    const mode_t before = umask(0);
    const FileDescriptor file = make_memory_file(8192);
    umask(before);
    const Mapping mapping(file.get(), 8192);
    const FileDescriptor opened = open_of_process(getpid(), file.get());
    for (const int fd : {file.get(), opened.get()}) {
        for (const off_t size : {0, 4096, 16384}) {
            EXPECT_EQ(ftruncate(fd, size), -1) << size;
            EXPECT_EQ(errno, EPERM);
        }
        struct stat status = {};
        ASSERT_EQ(fstat(fd, &status), 0);
        EXPECT_EQ(status.st_size, 8192);
        EXPECT_EQ(status.st_mode & 07777, 0600u);
    }
    mapping.data()[8191] = std::byte{1};
    EXPECT_ANY_THROW(Mapping(file.get(), 8193)) << "beyond its end";
}

// Nothing else is opened for a number that a peer says: a pipe would block, a file that shrinks would kill.
TEST(MemoryFile, OtherDescriptorsAreRefused) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const FileDescriptor shrinkable(memfd_create("crossdock", MFD_CLOEXEC));
    for (const int other : {ends[0], ends[1], shrinkable.get(), 0, -1, 1 << 30})
        EXPECT_ANY_THROW(open_of_process(getpid(), other)) << other;
    close(ends[0]);
    close(ends[1]);
}

// Root could open other users' memory, and would trust it.
TEST(MemoryFile, OtherUsersFilesAreRefused) {
    if (geteuid() != 0) GTEST_SKIP() << "to be another user takes root";
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (setresuid(65534, 65534, 65534) != 0) _exit(1);
        const FileDescriptor file = make_memory_file(4096);
        const int number = file.get();
        if (write(ends[1], &number, sizeof(number)) != sizeof(number)) _exit(1);
        for (;;) pause();
    }
    int number = -1;
    ASSERT_EQ(read(ends[0], &number, sizeof(number)), static_cast<ssize_t>(sizeof(number)));
    try {
        open_of_process(child, number);
        ADD_FAILURE() << "it was opened";
    } catch (const std::exception& error) {
        EXPECT_NE(std::strstr(error.what(), "belongs to user 65534"), nullptr) << error.what();
    }
    kill(child, SIGKILL);
    EXPECT_FALSE(succeeds(child));
    close(ends[0]);
    close(ends[1]);
}

// The memory of windows, whose file stays open, and with it all that make_memory_file() makes.
TEST(Processes, APeerCannotTakeMemoryAway) {
    run_processes(2, [](const ncclUniqueId& id, int rank) {
        ncclComm_t comm = nullptr;
        if (crossdockCommInitRank(&comm, 2, id, rank) != ncclSuccess) return false;
        const auto communicator = communicator_of(comm);
        const auto memory = communicator->allocate_symmetric(100'000, 10 * kSecond);
        void* of_window = nullptr;
        if (crossdockMemAlloc(&of_window, 100'000) != ncclSuccess) return false;
        int num_files = 0;
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
            std::error_code failed;
            const std::string target = std::filesystem::read_symlink(entry.path(), failed);
            if (target.find("memfd:crossdock") == std::string::npos) continue;
            ++num_files;
            if (ftruncate(std::atoi(entry.path().filename().c_str()), 0) == 0) return false;
        }
        communicator->barrier("shrunk", 10 * kSecond);
        *memory->peers.at(1 - rank, 99'999) = std::byte{1};
        communicator->barrier("written", 10 * kSecond);
        return num_files > 0 && memory->local[99'999] == std::byte{1};
    });
}

// A process that starts jobs and joins none of them keeps nothing of those that have started, nor of those whose id it
// has released.
TEST(Processes, ALauncherStartsAnyNumberOfJobs) {
    const auto joins = [](const ncclUniqueId& id, int rank) {
        ncclComm_t comm = nullptr;
        return crossdockCommInitRank(&comm, 1, id, rank) == ncclSuccess;
    };
    const size_t num_before = num_descriptors();
    for (int job = 0; job < 10; ++job) EXPECT_TRUE(succeeds(fork_rank(joins, make_id(), 0)));
    EXPECT_LE(num_descriptors(), num_before + 1) << "that of the last job";
    for (int job = 0; job < 10; ++job) {
        const ncclUniqueId id = make_id();
        for (int i = 0; i < 2; ++i) EXPECT_EQ(crossdockReleaseUniqueId(id), ncclSuccess) << last_error();
        ncclComm_t comm = nullptr;
        EXPECT_NE(crossdockCommInitRank(&comm, 1, id, 0), ncclSuccess);
    }
    EXPECT_LE(num_descriptors(), num_before);
    EXPECT_EQ(crossdockReleaseUniqueId(ncclUniqueId{}), ncclInvalidArgument);
    EXPECT_TRUE(mentions({"crossdockGetUniqueId"})) << last_error();
}

// A rank whose process is killed while it joins can be joined by another process.
TEST(Processes, AKilledJoinerIsSucceeded) {
    const ncclUniqueId id = make_id();
    const auto joins = [](const ncclUniqueId& shared_id, int rank) {
        ncclComm_t comm = nullptr;
        ncclResult_t result = ncclInvalidArgument;
        // Refused while the test has claimed the rank.
        while ((result = crossdockCommInitRank(&comm, 3, shared_id, rank)) == ncclInvalidArgument) usleep(3000);
        return result == ncclSuccess && crossdockCommBarrier(comm) == ncclSuccess &&
               crossdockCommDestroy(comm) == ncclSuccess;
    };
    const pid_t first = fork_rank(joins, id, 0);
    const pid_t killed = fork_rank(joins, id, 1);
    setenv("CROSSDOCK_JOIN_TIMEOUT_MS", "1", 1);
    ncclComm_t comm = nullptr;
    for (const int rank : {0, 1}) {
        while (crossdockCommInitRank(&comm, 3, id, rank) == ncclRemoteError) usleep(5000);
    }
    EXPECT_TRUE(mentions({"rank 1 is taken by process", std::to_string(killed).c_str()})) << last_error();
    kill(killed, SIGKILL);
    siginfo_t info;
    ASSERT_EQ(waitid(P_PID, static_cast<id_t>(killed), &info, WEXITED | WNOWAIT), 0);
    // It is missed, not counted among those who came.
    EXPECT_EQ(crossdockCommInitRank(&comm, 3, id, 2), ncclRemoteError);
    EXPECT_TRUE(mentions({"rank 2 timed out after 1 ms waiting for ranks 1 to join"})) << last_error();
    unsetenv("CROSSDOCK_JOIN_TIMEOUT_MS");
    EXPECT_FALSE(succeeds(killed));
    const pid_t second = fork_rank(joins, id, 1);
    const pid_t third = fork_rank(joins, id, 2);
    for (const pid_t child : {first, second, third}) EXPECT_TRUE(succeeds(child));
}

// Whoever starts last, the rank that never starts is named apart from those that had come and timed out.
TEST(Processes, TheRankThatNeverStartsIsNamed) {
    const ncclUniqueId id = make_id();
    setenv("CROSSDOCK_JOIN_TIMEOUT_MS", "20", 1);
    ncclComm_t comm = nullptr;
    for (const int rank : {1, 3, 0}) EXPECT_EQ(crossdockCommInitRank(&comm, 4, id, rank), ncclRemoteError);
    EXPECT_TRUE(mentions({"waiting for ranks 2 to join"})) << last_error();
    EXPECT_EQ(crossdockCommInitRank(&comm, 4, id, 2), ncclRemoteError);
    EXPECT_TRUE(mentions({"waiting for ranks 0, 1, 3, which had come before and gave up, to join"})) << last_error();
    unsetenv("CROSSDOCK_JOIN_TIMEOUT_MS");
}

// A process that is stopped while it holds the join lock blocks others no longer than their timeout, and is named.
TEST(Processes, AStoppedJoinerIsNamed) {
    const ncclUniqueId id = make_id();
    int64_t process_and_fd[2];  // as they lie in the id
    std::memcpy(process_and_fd, &id.internal[16], sizeof(process_and_fd));
    const Mapping segment(static_cast<int>(process_and_fd[1]), ControlSegment::bytes(2));
    auto& control = *reinterpret_cast<ControlSegment*>(segment.data());
    const pid_t stopped = fork();
    if (stopped == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pause();
    }
    control.join_lock.store(to_word({stopped, 0}));
    setenv("CROSSDOCK_JOIN_TIMEOUT_MS", "50", 1);
    ncclComm_t comm = nullptr;
    alarm(20);  // a hang ends the test
    EXPECT_EQ(crossdockCommInitRank(&comm, 2, id, 0), ncclRemoteError);
    EXPECT_TRUE(mentions({"rank 0 timed out waiting for process ", std::to_string(stopped).c_str(), "stopped"}))
        << last_error();
    kill(stopped, SIGKILL);
    EXPECT_FALSE(succeeds(stopped));
    EXPECT_EQ(crossdockCommInitRank(&comm, 2, id, 0), ncclRemoteError);
    EXPECT_TRUE(mentions({"rank 0 timed out after 50 ms waiting for ranks 1 to join"})) << last_error();
    alarm(0);
    unsetenv("CROSSDOCK_JOIN_TIMEOUT_MS");
}

// A child uses the library although threads of its parent were using it in the same way at the moment of the fork.
void expect_forks_beside(const std::function<bool()>& use) {
#if defined(CROSSDOCK_ASAN) || defined(CROSSDOCK_TSAN)
    GTEST_SKIP() << "the sanitizer's own locks are taken in a child that is forked beside other threads";
#endif
    // The first fork meets threads that use the library for the first time.
    std::atomic<bool> has_begun{false}, is_over{false};
    std::vector<std::thread> makers;
    for (int i = 0; i < 4; ++i) {
        makers.emplace_back([&] {
            while (!has_begun) std::this_thread::yield();
            while (!is_over) use();
        });
    }
    has_begun = true;
    for (int i = 0; i < 200 && !testing::Test::HasFailure(); ++i) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);  // a hang ends the child
            _exit(use() ? 0 : 1);
        }
        EXPECT_TRUE(succeeds(child)) << "child " << i;
    }
    is_over = true;
    for (std::thread& maker : makers) maker.join();
}

TEST(Processes, AForkFindsNoLockTakenOfIds) {
    expect_forks_beside([] {
        ncclUniqueId id;
        ncclComm_t comm = nullptr;
        return crossdockGetUniqueId(&id) == ncclSuccess && crossdockCommInitRank(&comm, 1, id, 0) == ncclSuccess &&
               crossdockCommDestroy(comm) == ncclSuccess;
    });
}

TEST(Processes, AForkFindsNoLockTakenOfTensors) {
    expect_forks_beside([] {
        const size_t size = 1;
        ncclEpTensor_t* tensor = nullptr;
        return ncclEpTensorAlloc(&tensor, 1, ncclInt32, &size, nullptr) == ncclSuccess &&
               ncclEpTensorDestroy(tensor) == ncclSuccess;
    });
}

TEST(Processes, AForkFindsNoLockTakenOfDeviceCommunicators) {
    expect_forks_beside([] { return crossdockDevCommDestroy(nullptr, 0) == ncclInvalidUsage; });
}

// A rank that ends right after joining is named at once, whether its peers have checked its process or not.
TEST(Processes, NamesAProcessThatEndedAfterJoining) {
    const ncclUniqueId id = make_id();
    const auto start = std::chrono::steady_clock::now();
    const auto program = [](const ncclUniqueId& shared_id, int rank) {
        ncclComm_t comm = nullptr;
        if (crossdockCommInitRank(&comm, 2, shared_id, rank) != ncclSuccess) return false;
        if (rank == 1) _exit(0);
        usleep(100'000);
        return crossdockCommBarrier(comm) == ncclRemoteError && mentions({"rank 1: its process", "has ended"});
    };
    const pid_t first = fork_rank(program, id, 0);
    EXPECT_TRUE(succeeds(fork_rank(program, id, 1)));
    EXPECT_TRUE(succeeds(first));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// A rank that destroys its communicator while another waits for it is named at once, though its process lives on.
TEST(Processes, NamesARankThatLeft) {
    const ncclUniqueId id = make_id();
    const auto program = [](const ncclUniqueId& shared_id, int rank) {
        ncclComm_t comm = nullptr;
        if (crossdockCommInitRank(&comm, 2, shared_id, rank) != ncclSuccess) return false;
        if (rank == 1) {
            if (crossdockCommDestroy(comm) != ncclSuccess) return false;
            return pause() != 0;  // until the parent ends it
        }
        const auto start = std::chrono::steady_clock::now();
        return crossdockCommBarrier(comm) == ncclRemoteError && mentions({"rank 1: it has left the communicator"}) &&
               std::chrono::steady_clock::now() - start < std::chrono::seconds(20);
    };
    const pid_t leaver = fork_rank(program, id, 1);
    EXPECT_TRUE(succeeds(fork_rank(program, id, 0)));
    kill(leaver, SIGKILL);
    EXPECT_FALSE(succeeds(leaver));
}

// A rank that is killed while others wait for it is named long before their timeout, and nothing of it stays.
TEST(Processes, AKilledRankIsNamedAndLeavesNothing) {
    constexpr int kRanks = 3;
    const auto before = names_in("/dev/shm");
    const auto in_tmp_before = names_in("/tmp");
    const ncclUniqueId id = make_id();
    const auto program = [](const ncclUniqueId& shared_id, int rank) {
        ncclComm_t comm = nullptr;
        if (crossdockCommInitRank(&comm, kRanks, shared_id, rank) != ncclSuccess) return false;
        const auto communicator = communicator_of(comm);
        auto memory = communicator->allocate_symmetric(1 << 20, 100 * kSecond);
        communicator->barrier("before the kill", 100 * kSecond);
        if (rank == 1) raise(SIGKILL);
        const auto start = std::chrono::steady_clock::now();
        if (crossdockCommBarrier(comm) != ncclRemoteError || !mentions({"rank 1", "has ended"})) return false;
        if (std::chrono::steady_clock::now() - start > std::chrono::seconds(30)) return false;
        // What the dead rank shared stays mapped here until it is let go.
        *memory->peers.at(1, 5) = std::byte{1};
        memory.reset();
        return crossdockCommDestroy(comm) == ncclSuccess;
    };
    std::vector<pid_t> children;
    for (int rank = 0; rank < kRanks; ++rank) children.push_back(fork_rank(program, id, rank));
    EXPECT_TRUE(succeeds(children[0]));
    EXPECT_FALSE(succeeds(children[1]));
    EXPECT_TRUE(succeeds(children[2]));
    EXPECT_EQ(names_in("/dev/shm"), before);
    for (const std::string& name : names_in("/tmp")) {
        EXPECT_TRUE(in_tmp_before.count(name) == 1 || name.find("crossdock") == std::string::npos) << name;
    }
}

// A rank that was stopped, as a shell or a debugger does, had no time to wait in: it does not lose one that comes late
// because of the same.
TEST(Processes, AStoppedRankLosesNobody) {
    enum Flag { kWaits, kGoOn, kNumFlags };
    void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    auto* const flags = new (memory) std::atomic<bool>[kNumFlags] {};
    const auto await = [&](Flag flag) {
        while (!flags[flag]) usleep(1000);
    };
    const ncclUniqueId id = make_id();
    const auto program = [&](const ncclUniqueId& shared_id, int rank) {
        ncclComm_t comm = nullptr;
        if (crossdockCommInitRank(&comm, 2, shared_id, rank) != ncclSuccess) return false;
        const auto communicator = communicator_of(comm);
        communicator->barrier("before", 100 * kSecond);
        if (rank == 0) flags[kWaits] = true;
        if (rank == 1) await(kGoOn);
        communicator->barrier("while one is stopped", 3 * kSecond);
        return true;
    };
    const pid_t stopped = fork_rank(program, id, 0);
    const pid_t late = fork_rank(program, id, 1);
    await(kWaits);
    usleep(50'000);
    kill(stopped, SIGSTOP);
    usleep(4'000'000);
    kill(stopped, SIGCONT);
    usleep(50'000);
    flags[kGoOn] = true;
    EXPECT_TRUE(succeeds(stopped));
    EXPECT_TRUE(succeeds(late));
    munmap(memory, 4096);
}

// Several communicators of the same processes at once, and ranks as threads of one process.
TEST(Processes, RanksMayShareAProcess) {
    const ncclUniqueId ids[2] = {make_id(), make_id()};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
        ranks.emplace_back([&, rank] {
            ncclComm_t comms[2];
            for (int i = 0; i < 2; ++i)
                ASSERT_EQ(crossdockCommInitRank(&comms[i], 2, ids[i], rank), ncclSuccess) << last_error();
            for (int round = 0; round < 20; ++round) {
                ASSERT_EQ(crossdockCommBarrier(comms[round % 2]), ncclSuccess) << last_error();
            }
            for (ncclComm_t comm : comms) ASSERT_EQ(crossdockCommDestroy(comm), ncclSuccess);
        });
    }
    for (auto& rank : ranks) rank.join();
    EXPECT_TRUE(maps_no_shared_memory());
}

}  // namespace
}  // namespace crossdock::cpu
