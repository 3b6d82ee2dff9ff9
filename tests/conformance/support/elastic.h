// SPDX-License-Identifier: Apache-2.0
// Elastic operations of either mode: calls with random tensors, what they must write, and random sequences of them.
#pragma once

#include <climits>
#include <deque>
#include <optional>

#include "conformance/support/group.h"
#include "conformance/support/options.h"
#include "conformance/support/random_problem.h"
#include "reference/elastic.h"

namespace crossdock::testing {

// As on_each_backend; low latency has elastic operations where all ranks are in one LSA team.
void on_each_elastic_backend(ncclEpAlgorithm_t mode, const std::vector<Backend>& kinds,
                             const std::function<void(const BackendSpec&)>& run);

// What all ranks of a group have in common.
struct ElasticShape {
    ncclEpAlgorithm_t mode = kLowLatency;
    uint64_t seed = 0;
    int num_ranks = 1;
    int local_experts = 1;
    int topk = 1;
    int max_tokens = 1;
    size_t most_granules = 1;  // of 16 bytes, of a row
    size_t most_scales = 0;
    uint32_t alignment = 1;  // of high throughput's handles by expert
    bool is_eager = false;   // high throughput
    bool peers_may_die = false;
    bool invariant = false;  // the group
    int budget = INT_MAX;    // rows that a rank keeps; a combine adds zeros for the others

    int num_experts() const { return num_ranks * local_experts; }
    // By expert: of one rank, with padding.
    int most_rows() const;
    std::string describe() const;
};
ElasticShape random_elastic_shape(ncclEpAlgorithm_t mode, uint64_t seed, int num_ranks);
// A group for it. timeout_ns 0: long enough for a loaded machine.
ncclEpGroupConfig_t elastic_config(RankContext& context, const ElasticShape& shape, uint64_t timeout_ns = 0);

// The buffers and descriptors of a call.
class ElasticTensors {
  public:
    ElasticTensors(RankContext& context, cudaStream_t stream) : context_(context), stream_(stream) {}
    Buffer& buffer(size_t bytes) { return buffers_.emplace_back(context_, stream_, bytes); }
    ncclEpTensor_t* tensor(ncclDataType_t type, const std::vector<size_t>& sizes, const Buffer& buffer) {
        return tensors_.emplace_back(type, sizes, buffer).get();
    }

  private:
    RankContext& context_;
    cudaStream_t stream_;
    std::deque<Buffer> buffers_;
    std::deque<Tensor> tensors_;
};

// What a buffer must hold, as far as that is defined.
class Expected {
  public:
    explicit Expected(size_t num) : bytes_(num, kPoison), is_defined_(num, 0) {}
    void set(size_t at, const void* source, size_t num);
    template <typename T>
    void set_element(size_t index, T value) {
        set(index * sizeof(T), &value, sizeof(T));
    }
    // Nothing is written, except where something else is said later.
    void untouched() { is_defined_.assign(is_defined_.size(), 1); }
    void undefined(size_t at, size_t num);
    // Stops the program at a difference.
    void check(RankContext& context, const Buffer& buffer, size_t row_bytes, const char* name) const;

  private:
    std::vector<std::byte> bytes_;
    std::vector<char> is_defined_;
};

class ElasticHandle;

// What a test wants of a call; the rest is random.
struct ElasticForm {
    std::optional<ncclDataType_t> type;
    std::optional<size_t> granules;  // of 16 bytes, of a row
    std::optional<size_t> scales;
    std::optional<bool> weights;
    unsigned tag = 0;
};

// How a caller lays out scales.
struct ElasticStrides {
    int64_t given[2];
    size_t of_row, of_column;  // in elements

    static ElasticStrides random(Random& random, size_t rows, size_t columns);
    size_t at(size_t row, size_t column) const { return row * of_row + column * of_column; }
    size_t elements(size_t rows, size_t columns) const {
        return rows == 0 || columns == 0 ? 0 : at(rows - 1, columns - 1) + 1;
    }
};

// A dispatch with inputs from a seed. What arrives is the routing of the handle when it is made.
class ElasticDispatchCall {
  public:
    ElasticDispatchCall(RankContext& context, ElasticHandle& handle, uint64_t step, const ElasticForm& form = {});
    crossdockElasticDispatch_t& arguments() { return call_; }
    ncclResult_t run();
    // Outputs by row have so many rows; what is behind them must stay as it is.
    void shrink(size_t rows);
    void check_untouched_from(size_t row) const;
    // After the call; the stream is synchronised.
    void check() const;

  private:
    std::vector<std::byte> row_of(int rank, int token) const;
    uint32_t scale_of(int rank, int token, size_t column) const;
    float weight_of(int rank, int token, size_t column) const;
    float weight_of_expert(const reference::ElasticArrivals::Token& came, size_t column) const;
    void make_inputs(Random& common, Random& random, bool with_weights);
    void make_outputs(Random& random);
    void check_numbers() const;

    RankContext& context_;
    ElasticHandle& handle_;
    const reference::ElasticRouting routing_;
    const uint64_t seed_;
    ElasticTensors tensors_;
    crossdockElasticDispatch_t call_ = CROSSDOCK_ELASTIC_DISPATCH_INIT;
    ncclDataType_t type_;
    size_t row_bytes_, num_scales_, tokens_, rows_;
    bool ids_are_64_bit_;
    ElasticStrides out_strides_;
    Buffer *received_, *scales_, *weights_, *ids_, *sources_, *rank_ends_, *counts_, *ends_, *statistics_;
};

// The same for a combine, along the handle's latest dispatch.
class ElasticCombineCall {
  public:
    ElasticCombineCall(RankContext& context, ElasticHandle& handle, uint64_t step, const ElasticForm& form = {});
    crossdockElasticCombine_t& arguments() { return call_; }
    ncclResult_t run();
    void check() const;

  private:
    std::vector<std::byte> row_of(int rank, int row) const;
    float weight_of(int rank, int row, size_t column) const;
    std::vector<std::byte> bias_of(size_t index, size_t token) const;
    float returned_weight(size_t token, size_t column) const;

    RankContext& context_;
    ElasticHandle& handle_;
    const reference::ElasticRouting routing_;
    const std::vector<reference::ElasticArrivals> arrivals_;
    const uint64_t seed_;
    ElasticTensors tensors_;
    crossdockElasticCombine_t call_ = CROSSDOCK_ELASTIC_COMBINE_INIT;
    ncclDataType_t type_;
    size_t row_bytes_, hidden_, tokens_, num_biases_;
    bool with_weights_;
    Buffer *combined_, *returned_;
};

// A handle with random routing.
class ElasticHandle {
  public:
    ElasticHandle(RankContext& context, ncclEpGroup_t group, const ElasticShape& shape, bool by_expert, uint64_t seed);
    ~ElasticHandle() { ncclEpHandleDestroy(handle_); }
    ElasticHandle(const ElasticHandle&) = delete;
    ElasticHandle& operator=(const ElasticHandle&) = delete;

    // Tokens go elsewhere.
    void route(uint64_t step);
    // With given ids, of each rank.
    void route(std::vector<std::vector<int64_t>> ids, bool are_64_bit = true);
    ncclResult_t update();
    // Each operation, and its check.
    void dispatch(uint64_t step);
    void combine(uint64_t step);

    // High throughput: of the next operations, the same on every rank.
    void limit_sms(uint64_t seed);

    ncclEpHandle_t get() const { return handle_; }
    cudaStream_t stream() const { return stream_; }
    const ElasticShape& shape() const { return shape_; }
    int lsa_team_size() const { return lsa_team_size_; }
    reference::ElasticRouting& routing() { return routing_; }
    std::vector<reference::ElasticArrivals> arrivals() const;
    uint64_t seed() const { return seed_; }
    bool is_routed() const { return ids_.has_value(); }
    bool is_dispatched() const { return dispatched_rows_.has_value(); }
    // Rows of the latest dispatch's outputs.
    size_t dispatched_rows() const { return dispatched_rows_.value_or(0); }
    void note_dispatched(size_t rows) { dispatched_rows_ = rows; }

  private:
    RankContext& context_;
    const ElasticShape shape_;
    const uint64_t seed_;
    cudaStream_t stream_;
    reference::ElasticRouting routing_;
    int lsa_team_size_ = 0;
    ncclEpHandle_t handle_ = nullptr;
    bool ids_are_64_bit_ = true;
    std::optional<Buffer> ids_;
    std::optional<size_t> dispatched_rows_;
};

// Operations of a handle by rank and one by expert, in any order. With several LSA teams, LL has none.
RankProgram random_elastic_operations(const ElasticShape& shape, int num_operations, uint64_t timeout_ns = 0);

}  // namespace crossdock::testing
