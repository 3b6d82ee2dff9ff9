// SPDX-License-Identifier: Apache-2.0
#include "bench/rank.h"

#include <fmt/format.h>

#include <memory>
#include <stdexcept>

#include "bench/floor.h"
#include "bench/library.h"
#include "bench/measure.h"
#include "bench/report.h"
#include "bench/routing.h"
#include "bench/rows.h"
#include "bench/workload.h"
#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

// Everything one rank holds during the run.
class BenchRank {
  public:
    BenchRank(const tools::RankContext& context, const Options& options, tools::Device& device)
        : context_(context),
          options_(options),
          device_(device),
          routing_(gather_routing()),
          measurer_(context, options, device) {
        libraries_.push_back(std::make_unique<EpLibrary>(own_library()));
        if (!options.library_path.empty()) {
            libraries_.push_back(std::make_unique<EpLibrary>(open_library(options.library_path)));
        }
        const std::vector<float> weights = draw_weights(options, context.rank);
        for (const auto& library : libraries_) {
            workloads_.push_back(std::make_unique<Workload>(*library, context, options, device,
                                                            draw_routing(options, context.rank), weights));
        }
        floor_ = make_floor(context, options, workloads_[0]->comm(), device,
                            count_bytes(options, routing_, context.rank, options.max_tokens(), Operation::kPair));
    }

    CaseResult run_case(int num_tokens) {
        CaseResult result;
        result.num_tokens = num_tokens;
        std::vector<OperationBytes> own_bytes;
        for (Operation operation : kOperations) {
            own_bytes.push_back(count_bytes(options_, routing_, context_.rank, num_tokens, operation));
            result.bytes[static_cast<int>(operation)] = mean_bytes(num_tokens, operation);
        }
        for (const auto& workload : workloads_) {
            result.libraries.push_back(describe(*workload));
            if (options_.validate) {
                result.libraries.back().validation =
                    validate(context_, options_, routing_, num_tokens, *workload, device_);
            }
            workload->select(num_tokens);
        }
        const std::vector<Timing> timings = measurer_.measure(works(own_bytes));
        for (size_t i = 0; i < timings.size(); ++i) {
            const size_t owner = i / kNumOperations;
            Timing* target = owner < workloads_.size() ? result.libraries[owner].timings : result.floors;
            target[i % kNumOperations] = timings[i];
        }
        return result;
    }

  private:
    std::vector<int32_t> gather_routing() const {
        const std::vector<int32_t> own = draw_routing(options_, context_.rank);
        std::vector<int32_t> all(own.size() * static_cast<size_t>(context_.num_ranks));
        check(crossdockCommAllGather(context_.host, own.data(), all.data(), own.size() * sizeof(int32_t)));
        return all;
    }

    // Each library's operations, then their floors.
    std::vector<Work> works(const std::vector<OperationBytes>& own_bytes) {
        std::vector<Work> works;
        for (const auto& workload : workloads_) {
            works.push_back([&workload] { workload->dispatch(); });
            works.push_back([&workload] { workload->combine(); });
            works.push_back([&workload] {
                workload->dispatch();
                workload->combine();
            });
        }
        for (const OperationBytes& bytes : own_bytes) {
            works.push_back(floor_->work(bytes));
        }
        return works;
    }

    OperationBytes mean_bytes(int num_tokens, Operation operation) const {
        OperationBytes sum = count_bytes(options_, routing_, 0, num_tokens, operation);
        if (context_.rank == 0) {
            for (int rank = 1; rank < context_.num_ranks; ++rank) {
                sum += count_bytes(options_, routing_, rank, num_tokens, operation);
            }
        }
        const double num_ranks = context_.num_ranks;
        sum.delivered /= num_ranks;
        sum.wire /= num_ranks;
        sum.v1 /= num_ranks;
        sum.v2 /= num_ranks;
        return sum;
    }

    static LibraryResult describe(Workload& workload) {
        const EpLibrary& library = workload.library();
        LibraryResult result;
        result.name = library.name;
        library.check(library.get_version(&result.version), "ncclEpGetVersion");
        if (library.group_memory != nullptr) {
            library.check(library.group_memory(workload.group(), &result.symmetric_bytes, &result.local_bytes),
                          "crossdockGroupMemory");
        }
        return result;
    }

    const tools::RankContext& context_;
    const Options& options_;
    tools::Device& device_;
    std::vector<int32_t> routing_;  // [ranks][max_tokens][topk]
    Measurer measurer_;
    std::vector<std::unique_ptr<EpLibrary>> libraries_;
    std::vector<std::unique_ptr<Workload>> workloads_;
    std::unique_ptr<Floor> floor_;
};

std::unique_ptr<tools::Device> make_device(const tools::RankContext& context, const Options& options) {
    if (options.world != World::kGpu) {
        return tools::make_cpu_device();
    }
    return tools::make_cuda_device(options.launched ? options.launched->local_rank : context.rank);
}

}  // namespace

void run_rank(const tools::RankContext& context, const Options& options) {
    const auto device = make_device(context, options);
    BenchRank bench(context, options, *device);
    const bool reports = context.rank == 0;
    const Machine machine = reports ? describe_machine(options) : Machine{};
    if (reports) {
        print_heading(options, machine);
    }
    std::vector<CaseResult> results;
    int num_wrong = 0;
    for (int num_tokens : options.tokens) {
        results.push_back(bench.run_case(num_tokens));
        if (reports) {
            print_case(options, results.back());
        }
        for (const LibraryResult& library : results.back().libraries) {
            num_wrong += options.validate && !library.validation.passed();
        }
    }
    if (reports) {
        print_footer(options, results);
        if (!options.json_path.empty()) {
            write_json(options, machine, results);
        }
        if (num_wrong > 0) {
            throw std::runtime_error(
                fmt::format("{} of {} validations failed", num_wrong, results.size() * results[0].libraries.size()));
        }
    }
}

}  // namespace crossdock::bench
