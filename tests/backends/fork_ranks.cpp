// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>

#include "internal.h"
#include "patient_clock.h"

namespace crossdock::testing {
namespace {

struct Child {
    pid_t pid = -1;
    int pipe = -1;
    std::string received;
};

// The report of a child: its digest, then its failures, each closed by a zero byte.
std::string packed(const ChildReport& report) {
    std::string bytes(reinterpret_cast<const char*>(&report.digest), sizeof report.digest);
    for (const std::string& failure : report.failures) bytes.append(failure).push_back('\0');
    return bytes;
}

void write_all(int pipe, const std::string& bytes) {
    for (size_t done = 0; done < bytes.size();) {
        const ssize_t written = write(pipe, bytes.data() + done, bytes.size() - done);
        if (written < 0 && errno != EINTR) return;
        if (written > 0) done += static_cast<size_t>(written);
    }
}

// Reads all pipes to their ends, or until the time is over.
void read_reports(std::vector<Child>& children, std::chrono::steady_clock::time_point deadline) {
    while (true) {
        std::vector<pollfd> polls;
        for (const Child& child : children) polls.push_back({child.pipe, POLLIN, 0});
        if (std::all_of(children.begin(), children.end(), [](const Child& child) { return child.pipe < 0; })) return;
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        if (left.count() <= 0) return;
        poll(polls.data(), polls.size(), static_cast<int>(left.count()));
        for (size_t i = 0; i < children.size(); ++i) {
            if (children[i].pipe < 0 || polls[i].revents == 0) continue;
            char buffer[4096];
            const ssize_t bytes = read(children[i].pipe, buffer, sizeof buffer);
            if (bytes > 0) {
                children[i].received.append(buffer, static_cast<size_t>(bytes));
            } else if (bytes == 0 || errno != EINTR) {
                close(children[i].pipe);
                children[i].pipe = -1;
                PatientClock::end(static_cast<int>(i));
            }
        }
    }
}

void unpack(const std::string& bytes, int rank, RunReport& report) {
    if (bytes.size() < sizeof(uint64_t)) return;
    std::memcpy(&report.digests[rank], bytes.data(), sizeof(uint64_t));
    for (size_t begin = sizeof(uint64_t); begin < bytes.size();) {
        const size_t end = std::min(bytes.find('\0', begin), bytes.size());
        report.failures.push_back(bytes.substr(begin, end - begin));
        begin = end + 1;
    }
}

std::string how_it_ended(int status) {
    if (WIFSIGNALED(status))
        return fmt::format("was ended by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
    return fmt::format("ended with exit status {}", WEXITSTATUS(status));
}

}  // namespace

RunReport fork_ranks(const BackendSpec& spec, int num_ranks, const std::function<ChildReport(int rank)>& child) {
    RunReport report;
    report.digests.resize(num_ranks);
    std::vector<Child> children(num_ranks);
    const pid_t parent = getpid();
    fflush(nullptr);
    for (int rank = 0; rank < num_ranks; ++rank) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
        const pid_t pid = fork();
        if (pid == 0) {
            // A test that is killed takes its ranks along.
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) _exit(1);
            for (const Child& sibling : children) {
                if (sibling.pipe >= 0) close(sibling.pipe);
            }
            close(ends[0]);
            write_all(ends[1], packed(child(rank)));
            _exit(0);
        }
        close(ends[1]);
        children[rank] = {pid, ends[0], {}};
        if (pid < 0) throw std::runtime_error("fork failed");
    }
    read_reports(children, std::chrono::steady_clock::now() + std::chrono::seconds(spec.limit_s));
    for (int rank = 0; rank < num_ranks; ++rank) {
        if (children[rank].pipe >= 0) {
            report.failures.push_back(fmt::format("rank {} was still running after {} s", rank, spec.limit_s));
            kill(children[rank].pid, SIGKILL);
            close(children[rank].pipe);
        }
        int status = 0;
        while (waitpid(children[rank].pid, &status, 0) < 0 && errno == EINTR) {
        }
        unpack(children[rank].received, rank, report);
        const bool doomed = std::find(spec.doomed.begin(), spec.doomed.end(), rank) != spec.doomed.end();
        if (status != 0 && !(doomed && WIFSIGNALED(status))) {
            report.failures.push_back(fmt::format("rank {} {}", rank, how_it_ended(status)));
        }
    }
    return report;
}

}  // namespace crossdock::testing
