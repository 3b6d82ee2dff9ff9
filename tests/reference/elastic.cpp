// SPDX-License-Identifier: Apache-2.0
#include "elastic.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "formats.h"

namespace crossdock::reference {
namespace {

int rounded_up(int count, uint32_t alignment) {
    return static_cast<int>((static_cast<uint32_t>(count) + alignment - 1) / alignment * alignment);
}

// A sum in fp32, from 0 on.
class Sum {
  public:
    Sum(ncclDataType_t type, size_t hidden) : type_(type), sums_(hidden, 0.0f) {}
    void add(const std::vector<std::byte>& row) {
        const std::vector<float> values = decoded(type_, row);
        for (size_t i = 0; i < sums_.size(); ++i) sums_[i] = std::fma(1.0f, values[i], sums_[i]);
    }
    std::vector<std::byte> rounded() const { return encoded(type_, sums_); }

  private:
    ncclDataType_t type_;
    std::vector<float> sums_;
};

}  // namespace

int ElasticRouting::local_expert(int target, int rank, int token, int column) const {
    const int64_t expert = id(rank, token, column) - int64_t{target} * local_experts;
    return id(rank, token, column) >= 0 && expert >= 0 && expert < local_experts ? static_cast<int>(expert) : -1;
}

std::vector<int> ElasticArrivals::Token::distinct() const {
    std::vector<int> once;
    for (const int row : rows) {
        if (row >= 0 && std::find(once.begin(), once.end(), row) == once.end()) once.push_back(row);
    }
    return once;
}

int ElasticArrivals::find(int source, int token) const {
    for (size_t n = 0; n < tokens.size(); ++n) {
        if (tokens[n].source == source && tokens[n].token == token) return static_cast<int>(n);
    }
    return -1;
}

ElasticArrivals elastic_arrivals(const ElasticRouting& routing, int target) {
    ElasticArrivals arrivals;
    arrivals.counts.assign(routing.local_experts, 0);
    for (int source = 0; source < routing.num_ranks; ++source) {
        for (int token = 0; token < routing.num_tokens(source); ++token) {
            ElasticArrivals::Token came{source, token, {}, {}};
            for (int k = 0; k < routing.topk; ++k)
                came.experts.push_back(routing.local_expert(target, source, token, k));
            for (int expert = 0; expert < routing.local_experts; ++expert) {
                if (std::find(came.experts.begin(), came.experts.end(), expert) != came.experts.end())
                    ++arrivals.counts[expert];
            }
            const bool comes = *std::max_element(came.experts.begin(), came.experts.end()) >= 0;
            if (comes) arrivals.tokens.push_back(came);
        }
        arrivals.rank_ends.push_back(static_cast<int>(arrivals.tokens.size()));
    }
    int end = 0;
    for (const int count : arrivals.counts) {
        arrivals.starts.push_back(end);
        end += rounded_up(count, routing.alignment);
        arrivals.expert_ends.push_back(routing.by_expert ? arrivals.starts.back() + count : end);
    }
    std::vector<int> next = arrivals.starts;
    for (size_t n = 0; n < arrivals.tokens.size(); ++n) {
        ElasticArrivals::Token& came = arrivals.tokens[n];
        came.rows.assign(routing.topk, -1);
        for (int expert = 0; expert < routing.local_experts; ++expert) {
            bool is_named = false;
            for (int k = 0; k < routing.topk; ++k) {
                if (came.experts[k] != expert) continue;
                came.rows[k] = routing.by_expert ? next[expert] : static_cast<int>(n);
                is_named = true;
            }
            if (is_named) ++next[expert];
        }
        for (const int row : came.rows) arrivals.num_rows = std::max(arrivals.num_rows, row + 1);
    }
    return arrivals;
}

std::vector<std::byte> elastic_sum(const ElasticRouting& routing, const std::vector<ElasticArrivals>& arrivals,
                                   int source, int token, ncclDataType_t type, size_t hidden,
                                   const std::vector<std::vector<std::byte>>& biases, int lsa_team_size,
                                   const std::function<std::vector<std::byte>(int rank, int row)>& row_of) {
    const int team_size = lsa_team_size == 0 ? routing.num_ranks : lsa_team_size;
    Sum total(type, hidden);
    for (const auto& bias : biases) total.add(bias);
    for (int first = 0; first < routing.num_ranks; first += team_size) {
        Sum of_team(type, hidden);
        bool has_rows = false;
        const bool is_own = source / team_size == first / team_size;
        for (int rank = first; rank < first + team_size; ++rank) {
            const int n = arrivals[rank].find(source, token);
            if (n < 0) continue;
            const std::vector<int> rows = arrivals[rank].tokens[n].distinct();
            Sum of_rank(type, hidden);
            for (const int row : rows) of_rank.add(row_of(rank, row));
            const std::vector<std::byte> returned = rows.size() == 1 ? row_of(rank, rows[0]) : of_rank.rounded();
            (is_own ? total : of_team).add(returned);
            has_rows = true;
        }
        if (!is_own && has_rows) total.add(of_team.rounded());
    }
    return total.rounded();
}

std::vector<std::byte> elastic_sum_of_choices(const ElasticRouting& routing,
                                              const std::vector<ElasticArrivals>& arrivals, int source, int token,
                                              ncclDataType_t type, size_t hidden,
                                              const std::vector<std::vector<std::byte>>& biases,
                                              const std::function<std::vector<std::byte>(int rank, int row)>& row_of) {
    Sum total(type, hidden);
    for (const auto& bias : biases) total.add(bias);
    std::set<int64_t> added;
    for (int k = 0; k < routing.topk; ++k) {
        const int64_t id = routing.id(source, token, k);
        if (id < 0 || !added.insert(id).second) continue;
        const int rank = static_cast<int>(id / routing.local_experts);
        const ElasticArrivals::Token& came = arrivals[rank].tokens[arrivals[rank].find(source, token)];
        total.add(row_of(rank, came.rows[k]));
    }
    return total.rounded();
}

}  // namespace crossdock::reference
