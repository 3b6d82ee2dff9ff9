// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

constexpr int kReplayBatches = 10;
constexpr int kOperationsPerBatch = 200;
constexpr double kMaxBatchUs = 25e3;
constexpr double kMaxGraphUs = 10e3;

// All threads and processes of a host share this clock.
double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Sleeps most of the time, since ranks may outnumber the CPUs, and is punctual at the end.
void wait_until(double start_us) {
    constexpr double kPunctualUs = 100;
    if (const double sleep_us = start_us - now_us() - kPunctualUs; sleep_us > 0) {
        std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(sleep_us));
    }
    while (now_us() < start_us) {
        sched_yield();
    }
}

}  // namespace

Measurer::Measurer(const tools::RankContext& context, const Options& options, tools::Device& device)
    : context_(context),
      options_(options),
      device_(device),
      gpu_(is_cuda(options.backend) ? make_gpu_stopwatch(device) : nullptr) {}

std::vector<Timing> Measurer::measure(const std::vector<Work>& works) {
    std::vector<std::vector<Sample>> samples(works.size());
    for (int iteration = -options_.num_warmups; iteration < options_.num_iterations; ++iteration) {
        for (size_t index = 0; index < works.size(); ++index) {
            const Sample sample = time_once(works[index]);
            settle(works[index]);
            if (iteration >= 0) {
                samples[index].push_back(sample);
            }
        }
    }
    std::vector<Timing> timings;
    for (const std::vector<Sample>& own : samples) {
        timings.push_back(reduce(gather(own)));
    }
    if (gpu_ == nullptr) {
        return timings;
    }
    for (size_t index = 0; index < works.size(); ++index) {
        if (works[index].has_graph()) {
            timings[index].graph_operations = operations_per_graph(timings[index]);
            gpu_->make_graph(index, [&] { works[index].run(timings[index].graph_operations); });
        }
    }
    for (size_t index = 0; index < works.size(); ++index) {
        timings[index].host = time_calls(works[index]);
        if (works[index].has_graph()) {
            timings[index].device = time_replays(index, timings[index]);
        }
    }
    gpu_->forget_graphs();
    return timings;
}

void Measurer::settle(const Work& work) {
    if (work.settle) {
        work.settle();
        device_.synchronize();
    }
}

Measurer::Sample Measurer::time_once(const Work& work) {
    barrier();
    const double delay_us = options_.skew_us * context_.rank / std::max(1, context_.num_ranks - 1);
    if (delay_us > 0) {
        wait_until(now_us() + delay_us);
    }
    Sample sample;
    if (gpu_ != nullptr) {
        sample.end_us = gpu_->time_once([&work] { work.run(1); });
    } else {
        // Without the delay: when this rank would have started in a run without skew.
        sample.start_us = now_us() - delay_us;
        work.run(1);
        sample.end_us = now_us();
    }
    return sample;
}

std::vector<std::vector<Measurer::Sample>> Measurer::gather(const std::vector<Sample>& own) const {
    const auto num_ranks = static_cast<size_t>(context_.num_ranks);
    std::vector<Sample> all(own.size() * num_ranks);
    check(crossdockCommAllGather(context_.host, own.data(), all.data(), own.size() * sizeof(Sample)));
    std::vector<std::vector<Sample>> samples(own.size());
    for (size_t i = 0; i < own.size(); ++i) {
        for (size_t rank = 0; rank < num_ranks; ++rank) {
            samples[i].push_back(all[rank * own.size() + i]);
        }
    }
    return samples;
}

Timing Measurer::reduce(const std::vector<std::vector<Sample>>& samples) const {
    std::vector<double> times;
    std::vector<double> slowest;
    for (const std::vector<Sample>& ranks : samples) {
        double first_start = ranks[0].start_us;
        double last_end = ranks[0].end_us;
        double sum = 0;
        for (const Sample& rank : ranks) {
            first_start = std::min(first_start, rank.start_us);
            last_end = std::max(last_end, rank.end_us);
            sum += rank.end_us - rank.start_us;
        }
        const auto num_ranks = static_cast<double>(ranks.size());
        // Where a skew is wanted, nothing can end before the last rank has started.
        times.push_back(gpu_ != nullptr ? sum / num_ranks : last_end - first_start - options_.skew_us);
        slowest.push_back(last_end - first_start);
    }
    Timing timing;
    timing.time = tools::spread_of(times);
    if (gpu_ != nullptr) {
        timing.slowest = tools::spread_of(slowest);
    }
    return timing;
}

tools::Spread Measurer::time_calls(const Work& work) {
    std::vector<double> own;
    barrier();
    for (int iteration = -options_.num_warmups; iteration < options_.num_iterations; ++iteration) {
        const double us = gpu_->time_call([&work] { work.run(1); });
        settle(work);
        if (iteration >= 0) {
            own.push_back(us);
        }
    }
    std::vector<double> all(own.size() * static_cast<size_t>(context_.num_ranks));
    check(crossdockCommAllGather(context_.host, own.data(), all.data(), own.size() * sizeof(double)));
    return tools::spread_of(all);
}

tools::Spread Measurer::mean_over_ranks(const std::vector<double>& own) const {
    std::vector<Sample> samples;
    for (double us : own) {
        samples.push_back({0, us});
    }
    return reduce(gather(samples)).time;
}

std::vector<KernelTiming> Measurer::measure_kernels(const std::vector<Work>& works, GpuGate& gate, KernelClock& clock) {
    constexpr int kOperationsAtOnce = 20;  // with more launches pending, a stream makes the host wait
    std::vector<KernelTiming> timings;
    for (const Work& work : works) {
        std::vector<double> durations;
        double num_kernels = 0;
        size_t num_meetings = 0;
        const size_t meetings_per_operation = work.settle ? 2 : 1;
        // What recording prepares at the first kernels must not happen behind a closed gate.
        gate.close();
        gate.open();
        gate.meet();
        work.run(1);
        settle(work);
        device_.synchronize();
        barrier();
        clock.take(1);
        barrier();
        for (int done = 0; done < options_.num_iterations; done += kOperationsAtOnce) {
            const int count = std::min(kOperationsAtOnce, options_.num_iterations - done);
            gate.close();
            for (int i = 0; i < count; ++i) {
                gate.meet();
                work.run(1);
                if (work.settle) {
                    gate.meet();
                    work.settle();
                }
            }
            gate.open();
            device_.synchronize();
            barrier();
            for (const KernelRecord& record : clock.take(static_cast<size_t>(count) * meetings_per_operation)) {
                num_meetings += record.kind == KernelRecord::Kind::kMeeting;
                if (num_meetings % meetings_per_operation != 1 % meetings_per_operation) {
                    continue;  // after the second meeting it is settled
                }
                if (record.kind == KernelRecord::Kind::kMeeting) {
                    durations.push_back(0);
                } else if (record.kind == KernelRecord::Kind::kOperation && !durations.empty()) {
                    durations.back() += static_cast<double>(record.end_ns - record.start_ns) * 1e-3;
                    ++num_kernels;
                }
            }
            barrier();
        }
        // Ranks agree on what they exchange, also where one has lost records.
        std::vector<char> all(static_cast<size_t>(context_.num_ranks));
        const char is_complete = durations.size() == static_cast<size_t>(options_.num_iterations);
        check(crossdockCommAllGather(context_.host, &is_complete, all.data(), sizeof is_complete));
        if (std::find(all.begin(), all.end(), 0) == all.end()) {
            timings.push_back({mean_over_ranks(durations), num_kernels / options_.num_iterations});
        } else {
            timings.emplace_back();
        }
    }
    return timings;
}

OverlapTiming Measurer::measure_overlap(GpuOverlap& overlap, const std::function<void()>& send,
                                        const std::function<void()>& complete) {
    std::vector<double> alone;
    std::vector<double> between;
    std::vector<double> sends;
    std::vector<double> completes;
    for (int iteration = -options_.num_warmups; iteration < options_.num_iterations; ++iteration) {
        const OverlapSample sample = overlap.run(send, complete);
        if (iteration >= 0) {
            alone.push_back(sample.alone);
            between.push_back(sample.between);
            sends.push_back(sample.send);
            completes.push_back(sample.complete);
        }
    }
    return {mean_over_ranks(alone), mean_over_ranks(between), mean_over_ranks(sends), mean_over_ranks(completes)};
}

// options.graph_operations, fewer if a graph would take too long. The same on all ranks, as the times are.
int Measurer::operations_per_graph(const Timing& timing) const {
    const int in_time = static_cast<int>(kMaxGraphUs / std::max(1.0, timing.time.median));
    return std::clamp(in_time, 1, options_.graph_operations);
}

// The slowest rank's steady-state time: operations keep ranks in step, and the busiest rank sets the lower bound.
tools::Spread Measurer::time_replays(size_t index, const Timing& timing) {
    const int num_operations = timing.graph_operations;
    const int in_time = static_cast<int>(kMaxBatchUs / std::max(1.0, timing.time.median));
    const int num_replays = std::max(1, std::min(kOperationsPerBatch, in_time) / num_operations);
    std::vector<Sample> samples;
    for (int batch = -1; batch < kReplayBatches; ++batch) {
        barrier();
        Sample sample;
        sample.end_us = gpu_->time_replays(index, num_replays) / num_operations;
        if (batch >= 0) {
            samples.push_back(sample);
        }
    }
    return reduce(gather(samples)).slowest;
}

void Measurer::barrier() const { check(crossdockCommBarrier(context_.host)); }

}  // namespace crossdock::bench
