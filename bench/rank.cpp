// SPDX-License-Identifier: Apache-2.0
#include "bench/rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <thread>

#include "bench/handles.h"
#include "bench/library.h"
#include "bench/lower_bound.h"
#include "bench/measure.h"
#include "bench/report.h"
#include "bench/routing.h"
#include "bench/rows.h"
#include "bench/workload.h"
#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

// The libraries, each with its communicator.
class Libraries {
  public:
    Libraries(const tools::RankContext& context, const Options& options) {
        libraries_.push_back(std::make_unique<EpLibrary>(own_library()));
        if (!options.library_path.empty()) {
            libraries_.push_back(std::make_unique<EpLibrary>(open_library(options.library_path)));
        }
        for (const auto& library : libraries_) {
            comms_.push_back(std::make_unique<LibraryComm>(*library, context, options.backend));
        }
    }

    const std::vector<std::unique_ptr<LibraryComm>>& comms() const { return comms_; }

  private:
    std::vector<std::unique_ptr<EpLibrary>> libraries_;
    std::vector<std::unique_ptr<LibraryComm>> comms_;
};

// Everything one rank holds for one setting.
class BenchRank {
  public:
    BenchRank(const tools::RankContext& context, const Libraries& libraries, const Options& setting,
              tools::Device& device)
        : context_(context),
          options_(setting),
          device_(device),
          routing_(gather_routing()),
          measurer_(context, options_, device) {
        const Traffic traffic(options_, routing_, options_.max_tokens());
        if (options_.is_high_throughput()) {
            set_budget(traffic);
        }
        const std::vector<float> weights = draw_weights(options_, context.rank);
        for (const auto& comm : libraries.comms()) {
            workloads_.push_back(
                make_workload(*comm, context, options_, device, draw_routing(options_, context.rank), weights));
        }
        lower_bound_ = make_lower_bound(context, options_, workloads_[0]->comm(), device,
                                        count_bytes(options_, traffic, context.rank, Operation::kPair), routing_);
    }

    CaseResult run_case(int num_tokens) {
        CaseResult result;
        result.setting = options_;
        result.num_tokens = num_tokens;
        result.lower_bound = lower_bound_->describe();
        const Traffic traffic(options_, routing_, num_tokens);
        const std::vector<Operation> operations = options_.operations();
        std::vector<OperationBytes> own_bytes;
        for (Operation operation : operations) {
            own_bytes.push_back(count_bytes(options_, traffic, context_.rank, operation));
            result.bytes[static_cast<int>(operation)] = mean_bytes(options_, traffic, operation);
        }
        for (const auto& workload : workloads_) {
            result.libraries.push_back(describe(*workload));
            if (options_.validate) {
                result.libraries.back().validation = sum_over_ranks(context_, workload->validate(routing_, num_tokens));
            }
            workload->select(num_tokens);
        }
        const std::vector<Timing> timings = measurer_.measure(works(num_tokens, own_bytes));
        for (size_t i = 0; i < timings.size(); ++i) {
            const size_t owner = i / operations.size();
            Timing* target = owner < workloads_.size() ? result.libraries[owner].timings : result.lower_bounds;
            target[static_cast<int>(operations[i % operations.size()])] = timings[i];
        }
        return result;
    }

    void add_kernels(GpuGate& gate, KernelClock& clock, CaseResult& result) {
        for (size_t i = 0; i < workloads_.size(); ++i) {
            workloads_[i]->select(result.num_tokens);
            const std::vector<Operation> operations = options_.operations();
            std::vector<Work> works;
            for (Operation operation : operations) {
                works.push_back(workloads_[i]->work(operation));
            }
            const std::vector<KernelTiming> timings = measurer_.measure_kernels(works, gate, clock);
            for (size_t index = 0; index < timings.size(); ++index) {
                result.libraries[i].kernels[static_cast<int>(operations[index])] = timings[index];
            }
        }
    }

    void time_handles(int num_tokens) {
        for (const auto& workload : workloads_) {
            workload->select(num_tokens);
            measure_handles(context_, options_, device_, *workload);
        }
    }

    void add_overlap(GpuOverlap& overlap, CaseResult& result) {
        for (size_t i = 0; i < workloads_.size(); ++i) {
            Workload& workload = *workloads_[i];
            workload.select(result.num_tokens);
            for (Operation operation : {Operation::kDispatch, Operation::kCombine}) {
                result.libraries[i].overlaps[static_cast<int>(operation)] = measurer_.measure_overlap(
                    overlap, [&workload, operation] { workload.send(operation); },
                    [&workload] { workload.complete(); });
            }
        }
    }

  private:
    std::vector<int32_t> gather_routing() const {
        const std::vector<int32_t> own = draw_routing(options_, context_.rank);
        std::vector<int32_t> all(own.size() * static_cast<size_t>(context_.num_ranks));
        check(crossdockCommAllGather(context_.host, own.data(), all.data(), own.size() * sizeof(int32_t)));
        return all;
    }

    // Each library's operations, then the lower bounds.
    std::vector<Work> works(int num_tokens, const std::vector<OperationBytes>& own_bytes) {
        std::vector<Work> works;
        for (const auto& workload : workloads_) {
            for (Operation operation : options_.operations()) {
                works.push_back(workload->work(operation));
            }
        }
        const std::vector<Operation> operations = options_.operations();
        for (size_t i = 0; i < own_bytes.size(); ++i) {
            works.push_back(lower_bound_->work(operations[i], num_tokens, own_bytes[i]));
        }
        return works;
    }

    // Fixed, unless the mode is eager: large enough for all that is routed here, and as large as the caller wants it.
    void set_budget(const Traffic& traffic) {
        uint64_t needed = traffic.most_slots();
        for (int rank = 0; rank < options_.num_ranks && !options_.is_expert_major(); ++rank) {
            needed = rank == 0 ? traffic.rank_rows_for(0) : std::max(needed, traffic.rank_rows_for(rank));
        }
        const auto max_tokens = static_cast<uint64_t>(options_.max_tokens());
        if (options_.budget > 0 && static_cast<uint64_t>(options_.budget) < needed) {
            throw std::runtime_error(
                fmt::format("--budget: {} is not enough, {} are routed to one rank", options_.budget, needed));
        }
        if (options_.budget == 0) {
            options_.budget = static_cast<int64_t>(options_.is_expert_major()
                                                       ? std::max(needed, max_tokens)
                                                       : max_tokens * static_cast<uint64_t>(options_.num_ranks));
        }
    }

    static LibraryResult describe(Workload& workload) {
        const EpLibrary& library = workload.library();
        LibraryResult result;
        result.name = library.name;
        result.start_up = workload.start_up();
        result.device_bytes = workload.device_bytes();
        library.check(library.get_version(&result.version), "ncclEpGetVersion");
        if (library.group_memory != nullptr) {
            library.check(library.group_memory(workload.group(), &result.symmetric_bytes, &result.local_bytes),
                          "crossdockGroupMemory");
        }
        return result;
    }

    const tools::RankContext& context_;
    Options options_;
    tools::Device& device_;
    std::vector<int32_t> routing_;  // [ranks][max_tokens][topk]
    Measurer measurer_;
    std::vector<std::unique_ptr<Workload>> workloads_;
    std::unique_ptr<LowerBound> lower_bound_;
};

std::unique_ptr<tools::Device> make_device(const tools::RankContext& context, const Options& options) {
    if (!is_cuda(options.backend)) {
        return tools::make_cpu_device();
    }
    return tools::make_cuda_device(options.launched ? options.launched->local_rank : context.rank);
}

// What comes after all timings, so as not to disturb them: overlaps, then kernels. `ranks`: one a setting.
void add_details(const tools::RankContext& context, const Options& options, ncclComm_t comm, tools::Device& device,
                 const std::vector<std::unique_ptr<BenchRank>>& ranks, std::vector<CaseResult>& results) {
    const bool reports = context.rank == 0;
    const auto leave_out = [reports](const char* option, const std::string& why) {
        if (reports) {
            fmt::print("\n  {} is left out: {}\n", option, why);
        }
    };
    std::string why;
    const std::unique_ptr<GpuGate> gate = make_gpu_gate(context, comm, device, why);
    if (gate == nullptr) {
        for (const auto& [option, is_wanted] :
             {std::pair{"--overlap", options.overlap}, {"--kernels", options.kernels}}) {
            if (is_wanted) {
                leave_out(option, why);
            }
        }
        return;
    }
    const size_t cases_per_setting = options.tokens.size();
    if (options.overlap) {
        if (const auto overlap = make_gpu_overlap(device, *gate, why)) {
            for (size_t i = 0; i < results.size(); ++i) {
                ranks[i / cases_per_setting]->add_overlap(*overlap, results[i]);
            }
            if (reports) {
                print_overlaps(results);
            }
        } else {
            leave_out("--overlap", why);
        }
    }
    if (options.kernels) {
        if (const auto clock = make_kernel_clock(device, why)) {
            for (size_t i = 0; i < results.size(); ++i) {
                ranks[i / cases_per_setting]->add_kernels(*gate, *clock, results[i]);
            }
            if (reports) {
                print_kernels(results);
            }
        } else {
            leave_out("--kernels", why);
        }
    }
}

// How long another library's teardown may take.
constexpr int kPatienceS = 5;

// A message where a validation failed, else nothing; the same on every rank.
std::string find_failure(const std::vector<CaseResult>& results) {
    size_t num_validations = 0;
    size_t num_wrong = 0;
    for (const CaseResult& result : results) {
        for (const LibraryResult& library : result.libraries) {
            num_validations += result.setting.validate;
            num_wrong += result.setting.validate && !library.validation.passed();
        }
    }
    return num_wrong > 0 ? fmt::format("{} of {} validations failed", num_wrong, num_validations) : "";
}

// Another library may never come back from destroying its groups. By now everything is reported, so nothing is lost
// when the process ends in the middle of that.
void leave_if_stuck(const Options& options, bool reports, const std::string& failure) {
    // Other ranks leave a little later: where ranks are threads, the one that has something to say does it for all.
    std::thread([library = options.library_path, reports, failure] {
        std::this_thread::sleep_for(std::chrono::seconds(reports ? kPatienceS : kPatienceS + 1));
        if (reports) {
            fmt::print(stderr, "ep_bench: {} has not let go of its groups for {} s; leaving\n{}{}", library, kPatienceS,
                       failure, failure.empty() ? "" : "\n");
        }
        std::fflush(nullptr);
        std::_Exit(failure.empty() ? 0 : 1);
    }).detach();
}

}  // namespace

void run_rank(const tools::RankContext& context, const Options& options) {
    const auto device = make_device(context, options);
    const Libraries libraries(context, options);
    const std::vector<Options> settings = options.settings();
    const bool reports = context.rank == 0;
    const Machine machine = reports ? describe_machine(options) : Machine{};
    if (reports) {
        print_heading(options, machine);
    }
    // All live until the end: not every library lets go of a group in the middle of a run.
    std::vector<std::unique_ptr<BenchRank>> ranks;
    std::vector<CaseResult> results;
    for (const Options& setting : settings) {
        ranks.push_back(std::make_unique<BenchRank>(context, libraries, setting, *device));
        if (reports) {
            print_setting(setting);
        }
        for (int num_tokens : setting.tokens) {
            results.push_back(ranks.back()->run_case(num_tokens));
            if (reports) {
                print_case(setting, results.back());
                write_json(options, machine, results);
            }
            if (setting.num_handles > 0) {
                ranks.back()->time_handles(num_tokens);
            }
        }
    }
    if (reports) {
        print_footer(options, results);
    }
    if (options.kernels || options.overlap) {
        add_details(context, options, libraries.comms()[0]->get(), *device, ranks, results);
        if (reports) {
            write_json(options, machine, results);
        }
    }
    const std::string failure = find_failure(results);
    if (!options.library_path.empty()) {
        leave_if_stuck(options, reports, failure);
    }
    if (reports && !failure.empty()) {
        throw std::runtime_error(failure);
    }
}

}  // namespace crossdock::bench
