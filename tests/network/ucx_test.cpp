// SPDX-License-Identifier: Apache-2.0
// UCX uses only transports that no stranger reaches, whatever its variables and files say; and what a rank says is its
// address cannot end another one's process.
#include "network/ucx.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "flood.h"
#include "network/transport.h"
#include "network/ucx_address.h"
#include "session.h"

namespace crossdock::network {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
using Bytes = std::vector<std::byte>;

struct Nobody : FrameReceiver {
    void on_frame(std::span<const std::byte>, Payload&) override {}
    void on_endpoint_error(uint32_t, const char*) override {}
};

// Segments of System V that this process has made: key shmid perms size cpid ...
int num_own_segments() {
    std::ifstream file("/proc/sysvipc/shm");
    int count = 0;
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
        std::istringstream words(line);
        int64_t key, id, mode, bytes, maker = 0;
        words >> key >> id >> mode >> bytes >> maker;
        count += maker == getpid() ? 1 : 0;
    }
    return count;
}

// How ranks that play two hosts or one reach each other with these variables: no port, no segment, and the right bytes.
void expect_private(const std::vector<std::pair<std::string, std::string>>& variables, const std::string& file = {}) {
    for (const bool plays_hosts : {false, true}) {
        run_ranks(2, [&](TestRank& rank) {
            for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
            if (plays_hosts) setenv("CROSSDOCK_HOST", std::to_string(rank.rank()).c_str(), 1);
            std::vector<uint64_t> words(8);
            Session session(rank);
            void* memory = session.add_memory(words.data(), 64);
            const std::string with = variables.empty() ? file : variables.front().second;
            rank.expect(listening_ports().empty(), "a port is open with UCX_TLS=" + with);
            rank.expect(num_own_segments() == 0, "there are segments of System V with UCX_TLS=" + with);
            session.finish(session.put_signal(1 - rank.rank(), memory, 0, 0, memory, 0, memory, 8, 1, true));
            session.await_word(words[1], 1);
            rank.barrier();
        });
    }
}

TEST(Ucx, NoVariableBringsBackStrangers) {
    // A backslash turns UCX's aliases off, and an auxiliary transport is one for setting up others.
    for (const char* transports :
         {"\\tcp", "sm,tcp:aux", "sm", "sysv", "all", "^posix", "tcp,posix,cma", "self", "\tcp"})
        expect_private({{"UCX_TLS", transports}, {"UCX_POSIX_ERROR_HANDLING", "y"}, {"UCX_SYSV_ERROR_HANDLING", "y"}});
    expect_private({{"UCX_TLS", "tcp"}, {"UCX_NET_DEVICES", "lo"}, {"UCX_SOCKADDR_TLS_PRIORITY", "tcp"}});
}

TEST(Ucx, NoFileOfTheUserBringsBackStrangers) {
    const auto home = std::filesystem::temp_directory_path() / ("crossdock-ucx-" + std::to_string(getpid()));
    std::filesystem::create_directories(home / ".ucx");
    for (const auto& path : {home / "ucx.conf", home / ".ucx" / "ucx.conf"})
        std::ofstream(path) << "UCX_TLS=tcp,sysv\nUCX_SYSV_ERROR_HANDLING=y\n";
    for (const char* variable : {"HOME", "UCX_CONFIG_DIR"}) expect_private({{variable, home.string()}});
    std::filesystem::remove_all(home);
}

// Changed addresses are refused, or lead nowhere. In a process of its own, so that this one does not open UCX.
TEST(Ucx, BadAddressesAreHarmless) {
    run_ranks(1, [](TestRank&) {
        use_ucx_memory();
        Nobody nobody;
        const auto context = UcxContext::shared();
        if (context == nullptr) return;  // there is no UCX
        UcxWorker worker(context, nobody, 1);
        const Bytes own = worker.address();
        ASSERT_TRUE(is_ucx_address(own));
        const auto process = static_cast<uint32_t>(getpid());
        const auto* number = reinterpret_cast<const std::byte*>(&process);
        // Three bytes: the descriptor begins in the upper bits of the fourth.
        const auto segment = std::search(own.begin(), own.end(), number, number + 3) - own.begin();
        ASSERT_LE(segment + 8, std::ssize(own));
        int num_refused = 0, num_tried = 0;
        for (uint32_t seed = 0; seed < 400; ++seed) {
            std::mt19937 random(seed);
            Bytes bytes = own;
            if (seed % 4 == 0) {
                bytes.resize(random() % 300);
                for (std::byte& each : bytes) each = static_cast<std::byte>(random());
            } else if (seed % 4 == 1) {
                bytes.resize(random() % own.size());
            }
            for (uint32_t i = 0; i < 1 + seed % 8 && !bytes.empty(); ++i)
                bytes[random() % bytes.size()] = static_cast<std::byte>(random());
            // Shared memory names a process and a descriptor, of any file; RDMA names no such thing.
            if (bytes.size() == own.size()) std::copy_n(own.begin() + segment, 7, bytes.begin() + segment);
            if (!is_ucx_address(bytes)) {
                ++num_refused;
                EXPECT_THROW(worker.connect(0, bytes), Error);
                continue;
            }
            ++num_tried;
            const pid_t child = fork();
            if (child == 0) {
                alarm(20);
                (void)worker.connect(0, bytes);
                for (int i = 0; i < 100; ++i) worker.progress();
                _exit(0);
            }
            int status = 0;
            waitpid(child, &status, 0);
            EXPECT_TRUE(WIFEXITED(status)) << "seed " << seed << ": signal " << WTERMSIG(status);
        }
        EXPECT_GT(num_refused, 100);
        EXPECT_GT(num_tried, 50);
        for (size_t bytes = 0; bytes < own.size(); ++bytes) EXPECT_FALSE(is_ucx_address(std::span(own).first(bytes)));
    });
}

// A rank that describes itself with garbage is named by the others, within a host and between hosts.
TEST(Ucx, ARankThatSendsGarbageIsNamed) {
    for (const bool plays_hosts : {false, true}) {
        run_ranks(2, [&](TestRank& rank) {
            use_ucx_memory();
            if (plays_hosts) setenv("CROSSDOCK_HOST", std::to_string(rank.rank()).c_str(), 1);
            struct Sink : FrameSink {
                void on_frame(const FrameHeader&, Payload&) override {}
                void on_departure(const Departure&) override {}
            } sink;
            for (uint32_t seed = 0; seed < 40; ++seed) {
                const Listener listener("=lo");
                char handle[128] = {};
                std::memcpy(handle, &listener.address(), sizeof(RankAddress));
                std::vector<RankAddress> addresses;
                for (auto& each : rank.exchange(handle)) addresses.push_back(read_address(each.data()));
                if (rank.rank() == 1) {
                    std::mt19937 random(seed);
                    const uint64_t host_bytes = seed % 2 == 0 ? random() % 200 : 0;
                    Bytes blob(8 + host_bytes + random() % 300);
                    for (std::byte& each : blob) each = static_cast<std::byte>(random());
                    std::memcpy(blob.data(), &host_bytes, seed % 5 == 4 ? 4 : 8);
                    const std::vector<Link> links = meet(listener, addresses, 1, blob, 20 * kSecond);
                    rank.barrier();
                    continue;
                }
                try {
                    // Without UCX, only what is for this host is read.
                    const Transport transport(listener, addresses, 0, {1, 20 * kSecond}, sink);
                } catch (const Error& error) {
                    const std::string message = error.what();
                    rank.expect(error.code() == ncclRemoteError && message.find("rank 1") != message.npos, message);
                }
                rank.barrier();
            }
        });
    }
}

// UCX is optional: where it, or shared memory, cannot be had, sockets carry the frames.
TEST(Ucx, SocketsCarryFramesWhereItFails) {
    run_ranks(2, [](TestRank& rank) {
        setenv("CROSSDOCK_HOST", std::to_string(rank.rank()).c_str(), 1);
        use_ucx_memory();
        if (rank.rank() == 1) setenv("UCX_POSIX_DIR", "/proc/none", 1);
        std::vector<uint64_t> words(8);
        Session session(rank);
        void* memory = session.add_memory(words.data(), 64);
        session.finish(session.put_signal(1 - rank.rank(), memory, 0, 0, memory, 0, memory, 8, 1, true));
        session.await_word(words[1], 1);
        rank.barrier();
    });
}

}  // namespace
}  // namespace crossdock::network
