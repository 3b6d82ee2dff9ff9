// SPDX-License-Identifier: Apache-2.0
#include "bench/routing.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <set>
#include <stdexcept>

#include <algorithm>
#include "bench/npy.h"
#include "tools/common/random.h"

namespace crossdock::bench {
namespace {

constexpr const char* kZipfPrefix = "zipf:";

bool is_zipf(const std::string& routing) { return routing.rfind(kZipfPrefix, 0) == 0; }

// -1 for anything but a number from 0 to 10.
double zipf_exponent(const std::string& routing) {
    const std::string text = routing.substr(std::string(kZipfPrefix).size());
    char* end = nullptr;
    const double exponent = std::strtod(text.c_str(), &end);
    return !text.empty() && *end == '\0' && exponent >= 0 && exponent <= 10 ? exponent : -1;
}

// topk different experts a token, in the order they were drawn. A draw that was there before is repeated; when only
// unlikely experts are left, the first of them are taken.
std::vector<int32_t> draw_weighted(const Options& options, int rank, double exponent) {
    std::vector<double> cumulative(static_cast<size_t>(options.num_experts));
    double sum = 0;
    for (size_t expert = 0; expert < cumulative.size(); ++expert) {
        sum += std::pow(1.0 + static_cast<double>(expert), -exponent);
        cumulative[expert] = sum;
    }
    tools::Random random(options.seed * 1000003 + static_cast<uint64_t>(rank));
    std::vector<int32_t> routing;
    for (int token = 0; token < options.max_tokens(); ++token) {
        std::set<int32_t> chosen;
        for (int attempt = 0; static_cast<int>(chosen.size()) < options.topk; ++attempt) {
            const auto place = std::upper_bound(cumulative.begin(), cumulative.end(), random.uniform() * sum);
            auto expert = static_cast<int32_t>(place - cumulative.begin());
            if (attempt > 64 * options.topk) {
                for (expert = 0; chosen.count(expert) > 0; ++expert) {
                }
            }
            if (expert < options.num_experts && chosen.insert(expert).second) {
                routing.push_back(expert);
            }
        }
    }
    return routing;
}

std::vector<int32_t> read_recorded(const Options& options, int rank) {
    const NpyMatrix recorded = read_npy(options.routing);
    const auto topk = static_cast<size_t>(options.topk);
    if (recorded.num_columns < topk || recorded.num_rows == 0) {
        throw std::runtime_error(fmt::format("--routing: {} has {} rows of {} experts, --topk {} needs more",
                                             options.routing, recorded.num_rows, recorded.num_columns, options.topk));
    }
    std::vector<int32_t> routing;
    for (int token = 0; token < options.max_tokens(); ++token) {
        const auto row =
            (static_cast<size_t>(rank) * static_cast<size_t>(options.max_tokens()) + static_cast<size_t>(token)) %
            recorded.num_rows;
        for (size_t k = 0; k < topk; ++k) {
            const int64_t expert = recorded.values[row * recorded.num_columns + k];
            if (expert >= options.num_experts) {
                throw std::runtime_error(fmt::format("--routing: {} names expert {}, --experts has 0 to {}",
                                                     options.routing, expert, options.num_experts - 1));
            }
            routing.push_back(static_cast<int32_t>(expert < 0 ? -1 : expert));
        }
    }
    return routing;
}

}  // namespace

std::string check_routing(const std::string& routing) {
    if (routing == "uniform" || (is_zipf(routing) && zipf_exponent(routing) >= 0)) {
        return "";
    }
    if (is_zipf(routing)) {
        return fmt::format("--routing: '{}' is not zipf:A with a number A from 0 to 10", routing);
    }
    if (routing.size() > 4 && routing.substr(routing.size() - 4) == ".npy") {
        return "";
    }
    return fmt::format("--routing: '{}' is not uniform, zipf:A or FILE.npy", routing);
}

std::vector<int32_t> draw_routing(const Options& options, int rank) {
    if (options.routing == "uniform") {
        return draw_weighted(options, rank, 0);
    }
    return is_zipf(options.routing) ? draw_weighted(options, rank, zipf_exponent(options.routing))
                                    : read_recorded(options, rank);
}

RowCounts count_rows(const Options& options, const std::vector<int32_t>& routing, int rank, int num_tokens) {
    const auto topk = static_cast<size_t>(options.topk);
    const auto num_ranks = static_cast<size_t>(options.num_ranks);
    const auto own = static_cast<size_t>(rank);
    RowCounts counts;
    counts.selections_to.resize(num_ranks);
    counts.rank_rows_to.resize(num_ranks);
    for (size_t from = 0; from < num_ranks; ++from) {
        for (size_t token = 0; token < static_cast<size_t>(num_tokens); ++token) {
            std::set<size_t> targets;
            for (size_t k = 0; k < topk; ++k) {
                const int32_t expert = routing[(from * static_cast<size_t>(options.max_tokens()) + token) * topk + k];
                if (expert < 0) {
                    continue;
                }
                const auto target = static_cast<size_t>(expert / options.num_local());
                targets.insert(target);
                counts.selections_in += target == own;
                counts.selections_to[target] += from == own;
            }
            counts.rank_rows_in += targets.count(own);
            for (size_t target : targets) {
                counts.rank_rows_to[target] += from == own;
            }
        }
    }
    for (size_t target = 0; target < num_ranks; ++target) {
        counts.selections += counts.selections_to[target];
        counts.rank_rows += counts.rank_rows_to[target];
    }
    counts.remote_selections = counts.selections - counts.selections_to[own];
    counts.remote_rank_rows = counts.rank_rows - counts.rank_rows_to[own];
    return counts;
}

}  // namespace crossdock::bench
