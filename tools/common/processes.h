// SPDX-License-Identifier: Apache-2.0
// Processes that are forked from this one, one per rank of a tool or a test. Each hands back a report.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace crossdock {

class Processes {
  public:
    Processes() = default;
    // Kills those that still run.
    ~Processes() { kill(); }
    Processes(const Processes&) = delete;
    Processes& operator=(const Processes&) = delete;

    // Forks: this process must have no other threads that hold locks. The new process ends when body has returned its
    // report, which must not throw, and is killed when this process ends. Throws std::system_error if it cannot be
    // started.
    void start(const std::function<std::string()>& body);

    // Returns when all have ended, with true; with false after the time, or earlier if there is something new.
    bool wait(std::chrono::milliseconds most);
    void wait();

    // Those that still run end at once.
    void kill();

    // In the order in which they were started.
    bool has_ended(size_t process) const { return processes_[process].pipe < 0; }
    bool was_killed_here(size_t process) const { return processes_[process].was_killed_here; }
    // Of one that has ended; empty if a signal ended it.
    const std::string& report(size_t process) const { return processes_[process].report; }
    // 0: no signal ended it.
    int signal(size_t process) const;
    // "was killed by signal 11 (Segmentation fault)", "ended with exit status 1"; empty: by returning from body.
    std::string how_it_ended(size_t process) const;

  private:
    struct Process {
        pid_t pid;
        int pipe;  // its report; -1: it has ended
        int status;
        bool was_killed_here;
        std::string report;
    };
    void end(Process& process);
    bool all_ended() const;

    std::vector<Process> processes_;
};

}  // namespace crossdock
