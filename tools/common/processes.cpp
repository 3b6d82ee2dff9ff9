// SPDX-License-Identifier: Apache-2.0
#include "tools/common/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <system_error>

namespace crossdock {
namespace {

void write_all(int pipe, const std::string& bytes) {
    for (size_t done = 0; done < bytes.size();) {
        const ssize_t written = write(pipe, bytes.data() + done, bytes.size() - done);
        if (written < 0 && errno != EINTR) return;
        if (written > 0) done += static_cast<size_t>(written);
    }
}

// An exception must not get out of here: the stack below is a copy of the parent's.
[[noreturn]] void run(const std::function<std::string()>& body, int pipe) noexcept {
    write_all(pipe, body());
    std::fflush(nullptr);
    _exit(0);
}

}  // namespace

void Processes::start(const std::function<std::string()>& body) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "a pipe to a process");
    const pid_t parent = getpid();
    std::fflush(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
        // Without the process that reads its report it has nothing to do.
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        for (const Process& sibling : processes_) {
            if (sibling.pipe >= 0) close(sibling.pipe);
        }
        close(ends[0]);
        run(body, ends[1]);
    }
    const int error = errno;
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        throw std::system_error(error, std::generic_category(), "a process cannot be started");
    }
    processes_.push_back({pid, ends[0], 0, false, {}});
}

bool Processes::wait(std::chrono::milliseconds most) {
    if (all_ended()) return true;
    std::vector<pollfd> polls;
    for (const Process& process : processes_) polls.push_back({process.pipe, POLLIN, 0});
    poll(polls.data(), polls.size(), static_cast<int>(most.count()));
    for (size_t i = 0; i < processes_.size(); ++i) {
        Process& process = processes_[i];
        if (process.pipe < 0 || polls[i].revents == 0) continue;
        char buffer[4096];
        const ssize_t bytes = read(process.pipe, buffer, sizeof buffer);
        if (bytes > 0) {
            process.report.append(buffer, static_cast<size_t>(bytes));
        } else if (bytes == 0 || errno != EINTR) {
            end(process);
        }
    }
    return all_ended();
}

void Processes::wait() {
    while (!wait(std::chrono::seconds(1))) {
    }
}

void Processes::kill() {
    for (Process& process : processes_) {
        if (process.pipe < 0) continue;
        process.was_killed_here = true;
        ::kill(process.pid, SIGKILL);
    }
    for (Process& process : processes_) {
        if (process.pipe >= 0) end(process);
    }
}

void Processes::end(Process& process) {
    close(process.pipe);
    process.pipe = -1;
    while (waitpid(process.pid, &process.status, 0) < 0 && errno == EINTR) {
    }
}

bool Processes::all_ended() const {
    return std::all_of(processes_.begin(), processes_.end(), [](const Process& each) { return each.pipe < 0; });
}

int Processes::signal(size_t process) const {
    const int status = processes_[process].status;
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

std::string Processes::how_it_ended(size_t process) const {
    if (const int number = signal(process); number != 0)
        return "was killed by signal " + std::to_string(number) + " (" + strsignal(number) + ")";
    const int status = WEXITSTATUS(processes_[process].status);
    return status == 0 ? "" : "ended with exit status " + std::to_string(status);
}

}  // namespace crossdock
