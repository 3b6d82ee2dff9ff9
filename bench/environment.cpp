// SPDX-License-Identifier: Apache-2.0
#include "bench/environment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "crossdock/communicator.hpp"

namespace crossdock::bench {
namespace {

struct Variables {
    const char* launcher;
    const char* rank;
    const char* num_ranks;
    const char* local_rank;
    const char* num_local_ranks;
    const char* required;  // set by the launcher only for the ranks it starts
};

constexpr Variables kLaunchers[] = {
    {"CROSSDOCK", "CROSSDOCK_RANK", "CROSSDOCK_NUM_RANKS", "CROSSDOCK_LOCAL_RANK", "CROSSDOCK_NUM_LOCAL_RANKS",
     "CROSSDOCK_RANK"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK"},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK"},
    // A batch script has the task variables too, but it is no step.
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_STEP_ID"},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"},
};

std::optional<int> number_in(const char* variable) {
    const char* text = std::getenv(variable);
    if (text == nullptr || *text == '\0') {
        return std::nullopt;
    }
    char* end = nullptr;
    const long number = std::strtol(text, &end, 10);
    if (*end != '\0' || number < 0 || number > 1000000) {
        throw std::runtime_error(fmt::format("{} is '{}', allowed: 0 to 1000000", variable, text));
    }
    return static_cast<int>(number);
}

// The launcher on this host is the parent of all ranks. Its start time tells it from an earlier process of the same
// number.
std::string default_path() {
    std::string start_time = "0";
    std::ifstream stat(fmt::format("/proc/{}/stat", getppid()));
    std::string line;
    std::getline(stat, line);
    const size_t name_end = line.rfind(')');
    if (name_end != std::string::npos) {
        std::istringstream fields(line.substr(name_end + 1));
        // The 22nd field of the line, the 20th after the name.
        for (int field = 0; field < 20; ++field) {
            fields >> start_time;
        }
    }
    const auto folder = std::filesystem::temp_directory_path();
    return (folder / fmt::format("ep_bench-{}-{}-{}", getuid(), getppid(), start_time)).string();
}

ncclUniqueId read_id(const std::string& path) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (std::chrono::steady_clock::now() < deadline) {
        // Others may write into the folder: an id counts only from this user.
        const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        ncclUniqueId id;
        struct stat status = {};
        const bool is_read = file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
                             status.st_uid == geteuid() &&
                             read(file, id.internal, sizeof id.internal) == sizeof id.internal;
        if (file >= 0) {
            close(file);
        }
        if (is_read) {
            return id;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    throw std::runtime_error(
        fmt::format("rank 0 left no id at {} within 60 s (--rendezvous names another file)", path));
}

}  // namespace

std::optional<LaunchedRank> launched_rank() {
    for (const Variables& names : kLaunchers) {
        if (std::getenv(names.required) == nullptr) {
            continue;
        }
        const auto rank = number_in(names.rank);
        const auto num_ranks = number_in(names.num_ranks);
        if (rank && num_ranks) {
            if (*rank >= *num_ranks) {
                throw std::runtime_error(fmt::format("{} is {}, allowed: less than {} ({})", names.rank, *rank,
                                                     names.num_ranks, *num_ranks));
            }
            const bool is_on_one_host = std::getenv("CROSSDOCK_ADDRESS") == nullptr &&
                                        number_in(names.num_local_ranks).value_or(*num_ranks) == *num_ranks &&
                                        number_in("SLURM_STEP_NUM_NODES").value_or(1) == 1;
            return LaunchedRank{*rank, *num_ranks, number_in(names.local_rank).value_or(*rank), is_on_one_host,
                                names.launcher};
        }
    }
    return std::nullopt;
}

ncclComm_t meet(const LaunchedRank& launched, std::string path) {
    if (!launched.is_on_one_host && path.empty()) {
        ncclComm_t comm = nullptr;
        check(crossdockCommInitFromEnvironment(&comm));
        return comm;
    }
    if (path.empty()) {
        path = default_path();
    }
    ncclUniqueId id;
    if (launched.rank == 0) {
        check(crossdockGetUniqueId(&id));
        // Renamed into place, so that no rank reads half an id.
        std::string fresh = path + ".XXXXXX";
        const int file = mkostemp(fresh.data(), O_CLOEXEC);
        const bool is_written = file >= 0 && write(file, id.internal, sizeof id.internal) == sizeof id.internal;
        if (file >= 0) {
            close(file);
        }
        if (!is_written || std::rename(fresh.c_str(), path.c_str()) != 0) {
            throw std::runtime_error(fmt::format("the ranks cannot meet at {}: it cannot be written", path));
        }
    } else {
        id = read_id(path);
    }
    ncclComm_t comm = nullptr;
    const ncclResult_t result = crossdockCommInitRank(&comm, launched.num_ranks, id, launched.rank);
    if (launched.rank == 0) {
        std::remove(path.c_str());
    }
    check(result);
    return comm;
}

}  // namespace crossdock::bench
