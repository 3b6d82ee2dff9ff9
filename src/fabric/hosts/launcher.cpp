// SPDX-License-Identifier: Apache-2.0
#include "fabric/hosts/launcher.h"

#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string_view>

#include "core/error.h"

namespace crossdock::hosts {
namespace {

struct Launcher {
    const char* name;
    const char* rank;
    const char* num_ranks;
    const char* local_rank;
    const char* num_local_ranks;  // srun has none
    const char* job;              // what names the job; may be empty
};

// Innermost first: torchrun and mpirun may have been started by srun.
constexpr Launcher kLaunchers[] = {
    {"CROSSDOCK", "CROSSDOCK_RANK", "CROSSDOCK_NUM_RANKS", "CROSSDOCK_LOCAL_RANK", "CROSSDOCK_NUM_LOCAL_RANKS", ""},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID"},
};

constexpr int kMostRanks = 4096;
// Below the kernel's ephemeral port range.
constexpr int kLocalFirstPort = 10'000;
constexpr uint64_t kLocalPorts = 10'000;
constexpr int kSlurmFirstPort = 20'000;
constexpr uint64_t kSlurmPorts = 10'000;

const char* text_of(const Variables& variables, const char* name) {
    const char* text = *name == '\0' ? nullptr : variables(name);
    return text == nullptr || *text == '\0' ? nullptr : text;
}

std::optional<uint64_t> number_of(const Variables& variables, const char* name, uint64_t least, uint64_t most) {
    const char* text = text_of(variables, name);
    if (text == nullptr) return std::nullopt;
    uint64_t value = 0;
    const char* end = text + std::strlen(text);
    const auto [stopped_at, error] = std::from_chars(text, end, value);
    require(error == std::errc{} && stopped_at == end && value >= least && value <= most, ncclInvalidUsage,
            "{} is '{}', allowed: {}..{}", name, text, least, most);
    return value;
}

uint64_t required_number(const Variables& variables, const char* name, uint64_t least, uint64_t most,
                         const char* because) {
    const auto number = number_of(variables, name, least, most);
    require(number.has_value(), ncclInvalidUsage, "{} is not set, but {} is: set both", name, because);
    return *number;
}

// "gpu[03-07,12],cpu1" begins with gpu03.
std::string first_host(std::string_view list) {
    const size_t bracket = list.find_first_of("[,");
    if (bracket == std::string_view::npos || list[bracket] == ',') return std::string(list.substr(0, bracket));
    const size_t end = list.find_first_of("-,]", bracket);
    const size_t close = list.find(']', bracket);
    require(end != std::string_view::npos && close != std::string_view::npos, ncclInvalidUsage,
            "SLURM_STEP_NODELIST is '{}', expected a list of hosts", list);
    const size_t comma = list.find(',', close);
    const std::string_view behind = list.substr(close + 1, comma == std::string_view::npos ? comma : comma - close - 1);
    return fmt::format("{}{}{}", list.substr(0, bracket), list.substr(bracket + 1, end - bracket - 1), behind);
}

std::string torch_address(const Variables& variables) {
    const char* host = text_of(variables, "MASTER_ADDR");
    require(host != nullptr, ncclInvalidUsage, "MASTER_ADDR is not set, but RANK is: set it to rank 0's host");
    // MASTER_PORT itself is used by torch's store.
    const uint64_t port = required_number(variables, "MASTER_PORT", 1, UINT16_MAX - 1, "MASTER_ADDR");
    const bool is_v6 = std::strchr(host, ':') != nullptr;
    return fmt::format("{}{}{}:{}", is_v6 ? "[" : "", host, is_v6 ? "]" : "", port + 1);
}

std::string slurm_address(const Variables& variables) {
    const char* list = text_of(variables, "SLURM_STEP_NODELIST");
    require(list != nullptr, ncclInvalidUsage,
            "SLURM_STEP_NODELIST is not set, but SLURM_PROCID is: start the program with srun, or set "
            "CROSSDOCK_ADDRESS to HOST:PORT of rank 0");
    const uint64_t job = required_number(variables, "SLURM_JOB_ID", 0, UINT64_MAX, "SLURM_PROCID");
    const uint64_t step = number_of(variables, "SLURM_STEP_ID", 0, UINT64_MAX).value_or(0);
    return fmt::format("{}:{}", first_host(list), kSlurmFirstPort + (job * 16 + step) % kSlurmPorts);
}

// Equal for all ranks of a job on one host: derived from the job's name if the launcher sets it, otherwise from the
// parent process, which is assumed to be the launcher.
uint16_t local_port(const Variables& variables) {
    uint64_t job = static_cast<uint64_t>(getppid());
    for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
        if (const char* text = text_of(variables, name)) {
            job = std::hash<std::string_view>{}(text);
            break;
        }
    }
    return static_cast<uint16_t>(kLocalFirstPort + job % kLocalPorts);
}

// Slurm's PMI-2 sets mpirun's variables, too, but not those of local ranks.
bool is_slurm_in_disguise(const Variables& variables, const Launcher& launcher) {
    const char* rank = text_of(variables, "SLURM_PROCID");
    return std::string_view(launcher.rank) == "PMI_RANK" && text_of(variables, launcher.local_rank) == nullptr &&
           rank != nullptr && std::string_view(rank) == text_of(variables, launcher.rank);
}

std::string address_of(const Variables& variables, const Launcher& launcher, const Launch& launch) {
    if (const char* address = text_of(variables, "CROSSDOCK_ADDRESS")) return address;
    const std::string_view name = launcher.name;
    if (name == "torchrun") return torch_address(variables);
    if (name == "srun") return slurm_address(variables);
    if (launch.local_ranks == launch.num_ranks) return fmt::format("localhost:{}", local_port(variables));
    fail(ncclInvalidUsage,
         "CROSSDOCK_ADDRESS is not set, and {}={} of {} says that this is rank {} of {}, but not where rank 0 is: set "
         "CROSSDOCK_ADDRESS to HOST:PORT, a host's name or address with a free port there (mpirun -x "
         "CROSSDOCK_ADDRESS=...)",
         launcher.rank, launch.rank, launcher.name, launch.rank, launch.num_ranks);
}

// Jobs of one launcher that differ in this must not mix.
std::string job_of(const Variables& variables, const Launcher& launcher) {
    const std::string given = given_job(variables);
    const char* id = text_of(variables, launcher.job);
    if (!given.empty() || id == nullptr) return given;
    const bool is_slurm = std::string_view(launcher.name) == "srun";
    const char* step = is_slurm ? text_of(variables, "SLURM_STEP_ID") : nullptr;
    return fmt::format("{}-{}{}{}", launcher.name, id, step == nullptr ? "" : ".", step == nullptr ? "" : step);
}

}  // namespace

std::string given_job(const Variables& variables) {
    const char* given = text_of(variables, "CROSSDOCK_JOB");
    return given == nullptr ? "" : given;
}

Launch read_launch(const Variables& variables) {
    for (const Launcher& launcher : kLaunchers) {
        if (text_of(variables, launcher.rank) == nullptr || is_slurm_in_disguise(variables, launcher)) continue;
        Launch launch;
        launch.launcher = launcher.name;
        launch.num_ranks =
            static_cast<int>(required_number(variables, launcher.num_ranks, 1, kMostRanks, launcher.rank));
        launch.rank = static_cast<int>(*number_of(variables, launcher.rank, 0, kMostRanks - 1));
        require(launch.rank < launch.num_ranks, ncclInvalidUsage, "{} is {}, allowed: less than {}, which is {}",
                launcher.rank, launch.rank, launcher.num_ranks, launch.num_ranks);
        if (const auto local = number_of(variables, launcher.num_local_ranks, 1, kMostRanks)) {
            launch.local_ranks = static_cast<int>(*local);
            require(*local <= static_cast<uint64_t>(launch.num_ranks), ncclInvalidUsage,
                    "{} is {}, allowed: at most {}, which is {}", launcher.num_local_ranks, *local, launcher.num_ranks,
                    launch.num_ranks);
            const auto local_rank = number_of(variables, launcher.local_rank, 0, kMostRanks - 1);
            require(!local_rank || *local_rank < *local, ncclInvalidUsage,
                    "{} is {}, allowed: less than {}, which is {}", launcher.local_rank, local_rank.value_or(0),
                    launcher.num_local_ranks, *local);
        }
        launch.address = address_of(variables, launcher, launch);
        launch.job = job_of(variables, launcher);
        return launch;
    }
    fail(ncclInvalidUsage,
         "no launcher has started this process: neither CROSSDOCK_RANK nor RANK (torchrun), OMPI_COMM_WORLD_RANK or "
         "PMI_RANK (mpirun) nor SLURM_PROCID (srun) is set. Without a launcher set CROSSDOCK_RANK, "
         "CROSSDOCK_NUM_RANKS and CROSSDOCK_ADDRESS (HOST:PORT of rank 0)");
}

}  // namespace crossdock::hosts
