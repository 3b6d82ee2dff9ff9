// SPDX-License-Identifier: Apache-2.0
// One rank's program, read from the fuzzer's bytes: calls of nccl_ep.h and crossdock.h with structs, sizes, tensors and
// sequences that are right, nearly right and wrong. Each call is followed by the check of what must hold after any
// call; a violation aborts, which libFuzzer reports with the input.
//
// All memory that tensors name is as large as the tensor says, so whatever a call touches beyond its tensors is seen by
// AddressSanitizer. What a caller may not do (name memory that is not there, overlap an input with an output, move a
// tensor's memory before the operation has ended) does not occur. Ranks make the same calls, but a session may end with
// one in which one rank differs in whatever a byte decides: operation, handle, type, width, recipe, window and so on.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <list>
#include <set>
#include <string>
#include <vector>

#include "crossdock.h"
#include "fuzz/input.h"
#include "fuzz/padded.h"
#include "src/core/layouts.h"
#include "src/core/recipes.h"
#include "tests/a2sgd/fuzz_calls.h"

namespace crossdock::fuzz {

// A tensor descriptor with its extents and memory, and what the memory held before the call.
struct FuzzTensor {
    ncclEpTensor_t descriptor{};
    size_t extents[4] = {};
    std::vector<uint8_t> memory;
    std::vector<uint8_t> before;
};

// Of the rows of a table that fit, the one that a byte decides; the table's first row, if none fits.
template <class Row, size_t kNum, class Fits>
Row fitting_row(const Row (&table)[kNum], uint32_t choice, Fits fits) {
    std::vector<Row> fitting;
    for (const Row& row : table) {
        if (fits(row)) fitting.push_back(row);
    }
    return fitting.empty() ? table[0] : fitting[choice % fitting.size()];
}

// What a session has in common with that of the other rank.
struct SessionKind {
    bool has_ht = false;        // groups may be high-throughput ones
    bool is_stoppable = false;  // bytes between the calls may say that a rank ends there, without a word to the other
    bool may_disagree = false;  // or that a rank makes the next call otherwise, and that all end behind it
};

// What ranks must pass alike to a low-latency dispatch without masks that is whole: where it was one, and succeeded.
struct PassedAlike {
    bool is_known = false;
    size_t group = 0;
    ncclEpLayout_t layout{};
    uint32_t topk = 0;
    uint32_t hidden = 0;
    ncclDataType_t dtype{};
    ncclEpDispQuant_t recipe{};

    bool operator==(const PassedAlike&) const = default;
};

class Session {
  public:
    // is_odd: this is the rank that stops or differs. keep: where memory goes that peers may write even when this rank
    // has ended, because they do not know; the caller frees it with crossdockMemFree when all have.
    Session(ncclComm_t comm, Input input, const SessionKind& kind, bool is_odd, std::vector<void*>& keep);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    void run();
    // Of the call at which a rank differed.
    const PassedAlike& passed() const { return passed_; }

  private:
    struct Group {
        ncclEpGroup_t group = nullptr;
        uint32_t num_experts = 1;
        uint32_t max_tokens = 1;
        bool is_ht = false;
        uint32_t budget = 0;
        bool has_masks = false;
        size_t number = 0;
    };
    struct Handle {
        ncclEpHandle_t handle = nullptr;
        Group group;
        ncclEpLayout_t layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
        uint32_t topk = 1;
        uint32_t num_tokens = 0;
        uint32_t hidden = 16;
        uint32_t alignment = 0;
    };

    // session.cpp: what calls are made of, and what holds after them.
    FuzzTensor& make_tensor(ncclDataType_t dtype, std::initializer_list<size_t> extents);
    ncclEpTensor_t* tensor(ncclDataType_t dtype, std::initializer_list<size_t> extents);
    // The tensor, or rarely the opposite of what belongs there.
    ncclEpTensor_t* tensor_if(bool belongs, ncclDataType_t dtype, std::initializer_list<size_t> extents);
    ncclEpTensor_t* make_routing(const Handle& handle, uint32_t num_tokens);
    void set_memory(FuzzTensor& made);
    void expect(ncclResult_t result, const char* call);
    // Notes a group's failure. Returns whether it is new: then the call has run, and more rows came than allowed. Later
    // calls of the group, which are refused, say the same.
    bool note_failure(ncclResult_t result);
    ncclEpLayout_t choose_layout(const Group& group);
    // High throughput: rows of a receive tensor that are enough for every routing.
    size_t num_rows(const Handle& handle) const;
    // Live ones mostly; rarely one that is destroyed, or none.
    Group choose_group();
    Handle* choose_handle();

    template <class Struct>
    Struct* break_struct(Padded<Struct>& padded) {
        return fuzz::break_struct(input_, padded);
    }

    // session_calls.cpp: a call each.
    void step();
    void disagree();
    void create_group();
    void destroy_group();
    void init_handle();
    void create_handle();
    void destroy_handle();
    void handle_mem_size();
    void update_handle();
    void dispatch();
    void combine();
    void complete();
    void use_masks();
    void allocate_tensor();
    void inspect();
    void use_settings(Handle& handle);
    void set_overlap(Handle& handle, uint32_t block_rows);
    void use_communicators();

    // session_ht_calls.cpp: the same for high-throughput handles and groups.
    void choose_ht_config(ncclEpGroupConfig_t& config);
    void fill_numbers(const Handle& handle, ncclEpLayoutInfo_t& layout_info);
    void dispatch_ht(Handle& handle);
    void combine_ht(const Handle& handle);

    // session_elastic_calls.cpp: for handles of both modes.
    void elastic_dispatch();
    void elastic_combine();

    // session_routing_calls.cpp: on host memory.
    void use_routing();

    void use_a2sgd() { a2sgd_.make(); }

    static constexpr int kMaxSteps = 48;
    static constexpr size_t kWindowBytes = 32768;

    ncclComm_t comm_;
    Input input_;
    SessionKind kind_;
    bool is_odd_;
    bool is_last_call_ = false;  // which may fail in the middle
    PassedAlike passed_;
    int num_ranks_ = 1;
    std::vector<Group> groups_;
    std::vector<Handle> handles_;
    std::set<std::string> failures_;  // of groups
    A2sgdCalls a2sgd_;
    bool is_about_a2sgd_ = false;
    std::list<FuzzTensor> tensors_;  // of all calls: what operations borrow must stay
    std::vector<FuzzTensor*> tensors_of_call_;
    void* window_memory_ = nullptr;
    ncclWindow_t window_ = nullptr;
    bool window_is_used_ = false;  // in the call at hand: two tensors must not overlap
    // Whether numbers of rows stay as they are: too few may be an error on one rank only, where fewer come, and then
    // ranks would make different operations.
    bool rows_are_fixed_ = false;
};

}  // namespace crossdock::fuzz
