// SPDX-License-Identifier: Apache-2.0
#include "bench/routing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <stdexcept>

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

// topk different experts per token, in the order they were drawn. A draw that was there before is repeated; when only
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

Traffic::Traffic(const Options& options, const std::vector<int32_t>& routing, int num_tokens)
    : num_ranks_(options.num_ranks), num_tokens_(num_tokens) {
    const auto num_ranks = static_cast<size_t>(num_ranks_);
    const auto num_local = static_cast<size_t>(options.num_local());
    const auto topk = static_cast<size_t>(options.topk);
    selections_.resize(num_ranks * num_ranks);
    rank_rows_.resize(num_ranks * num_ranks);
    std::vector<uint64_t> expert_rows(num_ranks * num_local);
    std::vector<uint64_t> last_token(num_ranks, ~uint64_t{0});  // that went there: a rank gets each token once
    for (size_t from = 0; from < num_ranks; ++from) {
        for (size_t token = 0; token < static_cast<size_t>(num_tokens); ++token) {
            const size_t number = from * static_cast<size_t>(options.max_tokens()) + token;
            for (size_t k = 0; k < topk; ++k) {
                const int32_t expert = routing[number * topk + k];
                if (expert < 0) {
                    continue;
                }
                const size_t to = static_cast<size_t>(expert) / num_local;
                ++selections_[from * num_ranks + to];
                ++expert_rows[static_cast<size_t>(expert)];
                rank_rows_[from * num_ranks + to] += last_token[to] != number;
                last_token[to] = number;
            }
        }
    }
    const auto alignment = static_cast<uint64_t>(options.alignment);
    for (size_t rank = 0; rank < num_ranks; ++rank) {
        uint64_t slots = 0;
        for (size_t local = 0; local < num_local; ++local) {
            slots += (expert_rows[rank * num_local + local] + alignment - 1) / alignment * alignment;
        }
        most_slots_ = std::max(most_slots_, slots);
    }
}

uint64_t Traffic::selections_of(int from) const {
    uint64_t sum = 0;
    for (int to = 0; to < num_ranks_; ++to) {
        sum += selections(from, to);
    }
    return sum;
}

uint64_t Traffic::rank_rows_of(int from) const {
    uint64_t sum = 0;
    for (int to = 0; to < num_ranks_; ++to) {
        sum += rank_rows(from, to);
    }
    return sum;
}

uint64_t Traffic::selections_for(int to) const {
    uint64_t sum = 0;
    for (int from = 0; from < num_ranks_; ++from) {
        sum += selections(from, to);
    }
    return sum;
}

uint64_t Traffic::rank_rows_for(int to) const {
    uint64_t sum = 0;
    for (int from = 0; from < num_ranks_; ++from) {
        sum += rank_rows(from, to);
    }
    return sum;
}

}  // namespace crossdock::bench
