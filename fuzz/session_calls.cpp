// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "fuzz/session.h"

namespace crossdock::fuzz {
namespace {

// An output that a failed call must leave as it was.
template <class Pointer>
Pointer sentinel() {
    return reinterpret_cast<Pointer>(uintptr_t{0x5a5a5a5a5a5a5a5a});
}

template <class Value>
void expect_untouched(ncclResult_t result, const Value& value, const Value& before, const char* call) {
    if (result != ncclSuccess && value != before) {
        std::fprintf(stderr, "FAILED after %s: a failed call has written its output\n", call);
        std::abort();
    }
}

cudaError_t allocate_hook(void** memory, size_t size, void* context) {
    // The context says how many allocations succeed.
    auto* left = static_cast<int*>(context);
    if (--*left < 0 || size > (size_t{1} << 28)) {
        return cudaErrorMemoryAllocation;
    }
    *memory = std::malloc(size);
    return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t free_hook(void* memory, void*) {
    std::free(memory);
    return cudaSuccess;
}

thread_local int allocations_left;

}  // namespace

void Session::step() {
    const uint8_t choice = input_.byte();
    struct Call {
        int below;
        void (Session::*make)();
    };
    static constexpr Call kCalls[] = {
        {60, &Session::dispatch},           {110, &Session::combine},         {124, &Session::complete},
        {138, &Session::elastic_dispatch},  {150, &Session::elastic_combine}, {180, &Session::update_handle},
        {192, &Session::init_handle},       {200, &Session::create_handle},   {208, &Session::destroy_handle},
        {216, &Session::create_group},      {220, &Session::destroy_group},   {230, &Session::use_masks},
        {235, &Session::handle_mem_size},   {240, &Session::allocate_tensor}, {246, &Session::inspect},
        {250, &Session::use_communicators}, {253, &Session::use_routing},     {256, &Session::use_a2sgd}};
    if (is_about_a2sgd_ && choice < 192) {
        use_a2sgd();
        return;
    }
    for (const Call& call : kCalls) {
        if (choice < call.below) {
            (this->*call.make)();
            return;
        }
    }
}

// One rank reads another byte than the other, anywhere in what decides the call. Behind it ranks know nothing of each
// other, so it is their last.
void Session::disagree() {
    void (Session::*const calls[])() = {&Session::dispatch, &Session::combine, &Session::update_handle,
                                        &Session::elastic_dispatch, &Session::elastic_combine};
    const size_t distance = input_.below(48);
    const auto by = static_cast<uint8_t>(1 + input_.below(255));
    if (is_odd_) {
        input_.change(distance, by);
    }
    is_last_call_ = true;
    (this->*calls[input_.below(5)])();
}

void Session::create_group() {
    Padded<ncclEpGroupConfig_t> config;
    ncclEpGroupConfig_t& whole = config.whole;
    whole.version = input_.or_edge(1 + input_.below(2));
    whole.algorithm = input_.rarely() ? static_cast<ncclEpAlgorithm_t>(input_.byte()) : NCCL_EP_ALGO_LOW_LATENCY;
    whole.num_experts = input_.or_edge((1 + input_.below(4)) * static_cast<uint32_t>(num_ranks_));
    whole.max_dispatch_tokens_per_rank = input_.or_edge(1 + input_.below(6));
    static constexpr uint32_t kTokenBytes[] = {64, 256, 1056, 16};
    whole.max_token_bytes = input_.or_edge(kTokenBytes[input_.below(4)]);
    whole.rdma_buffer_size = input_.rarely() ? input_.or_edge(input_.byte() * 4096u) : 0;
    whole.max_num_sms = input_.rarely() ? input_.or_edge(input_.byte()) : 0;
    whole.enable_mask = input_.below(2);
    whole.timeout_ns = input_.rarely() ? input_.or_edge(input_.byte() * 1000u) : 1000000000;
    whole.zero_copy = static_cast<ncclEpZeroCopyMode_t>(input_.or_edge(input_.below(3)));
    whole.overflow_policy = static_cast<ncclEpOverflowPolicy_t>(input_.rarely() ? input_.byte() : 0);
    whole.num_topk = input_.rarely() ? input_.or_edge(input_.byte()) : 0;
    if (kind_.has_ht && input_.below(4) != 0) {
        choose_ht_config(whole);
    }
    if (const uint8_t hooks = input_.byte(); hooks >= 192) {
        allocations_left = hooks >= 248 ? static_cast<int>(input_.below(4)) : 1000;
        whole.alloc = {hooks == 200 ? nullptr : allocate_hook, hooks == 201 ? nullptr : free_hook, &allocations_left};
    }
    Group made{sentinel<ncclEpGroup_t>(),
               whole.num_experts,
               whole.max_dispatch_tokens_per_rank,
               whole.algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT,
               whole.max_recv_tokens_per_rank,
               whole.enable_mask != 0,
               groups_.size()};
    ncclEpGroup_t* const group = input_.rarely() ? nullptr : &made.group;
    ncclComm_t const comm = input_.rarely() ? nullptr : comm_;
    ncclResult_t result;
    if (made.is_ht && whole.enable_mask != 0) {
        Padded<crossdockGroupOptions_t> options;
        options.whole.ht_masks = static_cast<int>(input_.or_edge(1));
        options.whole.invariant = static_cast<int>(input_.or_edge(1));
        result = crossdockCreateGroup(group, comm, break_struct(config), break_struct(options));
    } else {
        result = ncclEpCreateGroup(group, comm, break_struct(config));
    }
    expect_untouched(result, made.group, sentinel<ncclEpGroup_t>(), "ncclEpCreateGroup");
    expect(result, "ncclEpCreateGroup");
    if (result == ncclSuccess) {
        groups_.push_back(made);
    }
}

void Session::destroy_group() { expect(ncclEpGroupDestroy(choose_group().group), "ncclEpGroupDestroy"); }

void Session::init_handle() {
    Handle made;
    made.handle = sentinel<ncclEpHandle_t>();
    made.group = choose_group();
    made.layout = choose_layout(made.group);
    const auto topk = static_cast<int>(input_.or_edge(1 + input_.below(4)));
    made.topk = static_cast<uint32_t>(topk);
    Padded<ncclEpHandleConfig_t> config;
    config.whole.dispatch_output_per_expert_alignment =
        input_.or_edge(made.group.is_ht ? (1u << input_.below(4)) / 2 : 0);
    made.alignment = static_cast<uint32_t>(config.whole.dispatch_output_per_expert_alignment);
    ncclEpTensor_t* memory = nullptr;
    if (input_.byte() >= 192) {
        size_t bytes = input_.byte();
        if (!input_.rarely() &&
            ncclEpHandleMemSize(made.group.group, made.layout, nullptr, &bytes, topk) != ncclSuccess) {
            bytes = 64;
        }
        // A handle's memory may not lie in the window that its operations use.
        window_is_used_ = true;
        memory = &make_tensor(ncclUint8, {bytes}).descriptor;
    }
    ncclEpHandleConfig_t* given = input_.below(2) == 0 ? nullptr : break_struct(config);
    const ncclResult_t result =
        ncclEpInitHandle(input_.rarely() ? nullptr : &made.handle, made.group.group, made.layout, given, topk, memory);
    // The one output that a failure sets: NULL, where there is a place for it.
    if (result != ncclSuccess && made.handle != nullptr) {
        expect_untouched(result, made.handle, sentinel<ncclEpHandle_t>(), "ncclEpInitHandle");
    }
    expect(result, "ncclEpInitHandle");
    if (result == ncclSuccess) {
        handles_.push_back(made);
    }
}

void Session::create_handle() {
    Handle made;
    made.handle = sentinel<ncclEpHandle_t>();
    made.group = choose_group();
    made.layout = choose_layout(made.group);
    made.topk = 1 + input_.below(4);
    made.num_tokens = input_.below(made.group.max_tokens % 64 + 2);
    Padded<ncclEpHandleConfig_t> config;
    Padded<ncclEpLayoutInfo_t> layout_info;
    ncclEpTensor_t* routing = make_routing(made, made.num_tokens);
    fill_numbers(made, layout_info.whole);
    const ncclResult_t result =
        ncclEpCreateHandle(&made.handle, made.group.group, made.layout, routing,
                           input_.rarely() != made.group.is_ht ? break_struct(layout_info) : nullptr,
                           input_.below(2) == 0 ? nullptr : break_struct(config), nullptr);
    if (result != ncclSuccess && made.handle != nullptr) {
        expect_untouched(result, made.handle, sentinel<ncclEpHandle_t>(), "ncclEpCreateHandle");
    }
    expect(result, "ncclEpCreateHandle");
    if (result == ncclSuccess) {
        handles_.push_back(made);
    }
}

void Session::destroy_handle() { expect(ncclEpHandleDestroy(choose_handle()->handle), "ncclEpHandleDestroy"); }

void Session::handle_mem_size() {
    Padded<ncclEpHandleConfig_t> config;
    const size_t before = 0x5a5a;
    size_t bytes = before;
    const Group group = choose_group();
    const ncclEpLayout_t layout = choose_layout(group);
    const ncclResult_t result =
        ncclEpHandleMemSize(group.group, layout, input_.below(2) == 0 ? nullptr : break_struct(config),
                            input_.rarely() ? nullptr : &bytes, static_cast<int>(input_.or_edge(1 + input_.below(8))));
    expect_untouched(result, bytes, before, "ncclEpHandleMemSize");
    expect(result, "ncclEpHandleMemSize");
}

void Session::update_handle() {
    Handle& handle = *choose_handle();
    const uint32_t num_tokens = input_.below(handle.group.max_tokens % 64 + 2);
    Padded<ncclEpLayoutInfo_t> layout_info;
    ncclEpTensor_t* routing = make_routing(handle, num_tokens);
    fill_numbers(handle, layout_info.whole);
    const bool is_told = input_.rarely() != handle.group.is_ht;
    const ncclResult_t result =
        ncclEpUpdateHandle(handle.handle, routing, is_told ? break_struct(layout_info) : nullptr, nullptr);
    expect(result, "ncclEpUpdateHandle");
    if (result == ncclSuccess) {
        handle.num_tokens = num_tokens;
    }
}

void Session::dispatch() {
    Handle& handle = *choose_handle();
    if (handle.group.is_ht) {
        dispatch_ht(handle);
        return;
    }
    const bool is_expert_major = handle.layout != NCCL_EP_LAYOUT_RANK_MAJOR;
    const auto num_ranks = static_cast<size_t>(num_ranks_);
    const size_t max_tokens = handle.group.max_tokens;
    const size_t zones = is_expert_major ? handle.group.num_experts / num_ranks : num_ranks;
    const size_t slots = is_expert_major ? num_ranks * max_tokens : max_tokens;
    static constexpr uint32_t kHidden[] = {16, 8, 32, 128, 256, 512, 7, 24};
    static constexpr ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32, ncclUint8};
    const uint8_t kind = input_.byte();
    const DispatchRecipe recipe =
        kind < 150 ? recipe_of(NCCL_EP_DISP_QUANT_NONE)
        : kind < 200
            ? recipe_of(NCCL_EP_DISP_QUANT_FWD)
            : fitting_row(kDispatchRecipes, kind, [](const DispatchRecipe& each) { return each.computes_scales(); });
    const bool computes_scales = recipe.computes_scales();
    const ncclDataType_t dtype = computes_scales          ? recipe.token_type
                                 : recipe.forwards_scales ? ncclFloat8e4m3
                                                          : kTypes[input_.below(4)];
    handle.hidden = computes_scales ? 512 : kHidden[input_.below(8)];
    const size_t scales = computes_scales ? handle.hidden / recipe.scale_block : 4;
    const ncclDataType_t scale_type = computes_scales ? recipe.scale_type : ncclFloat32;

    Padded<ncclEpDispatchInputs_t> inputs;
    Padded<ncclEpDispatchOutputs_t> outputs;
    Padded<ncclEpLayoutInfo_t> layout_info;
    Padded<ncclEpDispatchConfig_t> config;
    inputs.whole.tokens = tensor(dtype, {handle.num_tokens, handle.hidden});
    inputs.whole.topk_weights = tensor_if(!is_expert_major, ncclFloat32, {handle.num_tokens, handle.topk});
    inputs.whole.scales = tensor_if(recipe.forwards_scales, scale_type, {handle.num_tokens, scales});
    outputs.whole.tokens = tensor(computes_scales ? recipe.received_type : dtype, {zones, slots, handle.hidden});
    outputs.whole.topk_weights = tensor_if(!is_expert_major, ncclFloat32, {zones, slots, handle.topk});
    outputs.whole.topk_idx = tensor_if(!is_expert_major, ncclInt32, {zones, slots, handle.topk});
    outputs.whole.scales = tensor_if(recipe.forwards_scales || computes_scales, scale_type, {zones, slots, scales});
    layout_info.whole.expert_counters = tensor_if(is_expert_major, ncclInt32, {zones});
    layout_info.whole.src_rank_counters = tensor_if(!is_expert_major, ncclInt32, {zones});
    layout_info.whole.recv_topk_idx_kind = static_cast<ncclEpExpertIdKind_t>(input_.or_edge(input_.below(3)));
    config.whole.send_only = input_.below(3) == 0;
    config.whole.round_scales = computes_scales ? input_.below(2) : input_.or_edge(0);
    config.whole.pass_direction = static_cast<ncclEpPassDir_t>(input_.rarely() ? input_.byte() : 0);
    config.whole.quant_recipe = static_cast<ncclEpDispQuant_t>(input_.or_edge(recipe.value));
    const ncclDataType_t wide = input_.below(2) == 0 ? ncclInt32 : ncclInt64;
    layout_info.whole.expert_offsets = tensor_if(input_.below(4) == 0, wide, {handle.group.num_experts / num_ranks});
    layout_info.whole.recv_total_counter = tensor_if(input_.below(4) == 0, wide, {1});
    const ncclResult_t result = ncclEpDispatch(handle.handle, break_struct(inputs), break_struct(outputs),
                                               break_struct(layout_info), break_struct(config), nullptr);
    expect(result, "ncclEpDispatch");
    const bool is_whole = config.whole.send_only == 0 && config.whole.size >= NCCL_EP_DISPATCH_CONFIG_V1_SIZE;
    if (is_last_call_ && result == ncclSuccess && is_whole && !handle.group.has_masks) {
        passed_ = {true, handle.group.number, handle.layout, handle.topk, handle.hidden, dtype, recipe.value};
    }
}

void Session::combine() {
    const Handle& handle = *choose_handle();
    if (handle.group.is_ht) {
        combine_ht(handle);
        return;
    }
    const bool is_expert_major = handle.layout != NCCL_EP_LAYOUT_RANK_MAJOR;
    const auto num_ranks = static_cast<size_t>(num_ranks_);
    const size_t max_tokens = handle.group.max_tokens;
    const size_t zones = is_expert_major ? handle.group.num_experts / num_ranks : num_ranks;
    const size_t slots = is_expert_major ? num_ranks * max_tokens : max_tokens;
    static constexpr ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32, ncclBfloat16};
    const uint8_t kind = input_.byte();
    const CombineRecipe recipe = kind < 224 ? recipe_of(NCCL_EP_COMB_QUANT_NONE)
                                            : fitting_row(kCombineRecipes, kind, [](const CombineRecipe& each) {
                                                  return each.in_ll && each.quantises();
                                              });
    const ncclDataType_t dtype = recipe.quantises() ? ncclBfloat16 : kTypes[input_.below(4)];
    const size_t hidden = recipe.quantises() ? recipe.row_multiple : input_.byte() < 200 ? handle.hidden : 16;

    Padded<ncclEpCombineInputs_t> inputs;
    Padded<ncclEpCombineOutputs_t> outputs;
    Padded<ncclEpCombineConfig_t> config;
    inputs.whole.tokens = tensor(dtype, {zones, slots, hidden});
    inputs.whole.scales = tensor_if(recipe.takes_row_scales, ncclFloat32, {zones, slots, 1});
    outputs.whole.tokens = tensor(dtype, {handle.num_tokens, hidden});
    outputs.whole.topk_weights = tensor_if(is_expert_major, ncclFloat32, {handle.num_tokens, handle.topk});
    config.whole.send_only = input_.below(3) == 0;
    config.whole.pass_direction = static_cast<ncclEpPassDir_t>(input_.rarely() ? input_.byte() : 0);
    config.whole.quant_recipe = static_cast<ncclEpCombQuant_t>(input_.or_edge(recipe.value));
    expect(ncclEpCombine(handle.handle, break_struct(inputs), break_struct(outputs), break_struct(config), nullptr),
           "ncclEpCombine");
}

void Session::complete() {
    Padded<ncclEpCompleteConfig_t> config;
    expect(ncclEpComplete(choose_handle()->handle, input_.below(2) == 0 ? nullptr : break_struct(config), nullptr),
           "ncclEpComplete");
}

void Session::use_masks() {
    const ncclEpGroup_t group = choose_group().group;
    std::vector<int> mask(static_cast<size_t>(num_ranks_), 1);
    int* given = input_.rarely() ? nullptr : mask.data();
    int error = -1;
    uint64_t dropped = 0;
    switch (input_.below(6)) {
        case 0:
            expect(ncclEpMaskQuery(group, given, nullptr), "ncclEpMaskQuery");
            break;
        case 1:
            for (int& entry : mask) {
                entry = static_cast<int>(input_.below(3)) - 1;
            }
            expect(ncclEpMaskUpdate(group, given, nullptr), "ncclEpMaskUpdate");
            break;
        case 2:
            expect(ncclEpMaskClean(group, nullptr), "ncclEpMaskClean");
            break;
        case 3: {
            const ncclResult_t result = ncclEpGetAsyncError(group, given == nullptr ? nullptr : &error);
            expect_untouched(result, error, -1, "ncclEpGetAsyncError");
            expect(result, "ncclEpGetAsyncError");
            break;
        }
        case 4:
            expect(
                crossdockHandleDroppedTokens(choose_handle()->handle, given == nullptr ? nullptr : &dropped, nullptr),
                "crossdockHandleDroppedTokens");
            break;
        default:
            expect(ncclEpErrorClear(group), "ncclEpErrorClear");
    }
}

void Session::allocate_tensor() {
    Padded<ncclEpTensorAllocConfig_t> config;
    const size_t extents[4] = {input_.byte(), input_.or_edge(2), 3, 4};
    ncclEpTensor_t* made = sentinel<ncclEpTensor_t*>();
    const ncclResult_t result = ncclEpTensorAlloc(
        input_.rarely() ? nullptr : &made, input_.below(5), static_cast<ncclDataType_t>(input_.byte()),
        input_.rarely() ? nullptr : extents, input_.below(2) == 0 ? nullptr : break_struct(config));
    expect_untouched(result, made, sentinel<ncclEpTensor_t*>(), "ncclEpTensorAlloc");
    expect(result, "ncclEpTensorAlloc");
    if (result == ncclSuccess) {
        size_t* sizes = made->sizes;
        if (input_.rarely()) {
            size_t other[4] = {1, 1, 1, 1};
            made->sizes = other;
            expect(ncclEpTensorDestroy(made), "ncclEpTensorDestroy");
            made->sizes = sizes;
        }
        expect(ncclEpTensorDestroy(made), "ncclEpTensorDestroy");
    }
    expect(ncclEpTensorDestroy(input_.below(2) == 0 ? nullptr : &make_tensor(ncclFloat32, {1}).descriptor),
           "ncclEpTensorDestroy");
}

void Session::inspect() {
    int version = -1;
    size_t symmetric = 0;
    size_t local = 0;
    Padded<crossdockDiagnosis_t> diagnosis;
    Padded<crossdockMemoryUse_t> use;
    switch (input_.below(5)) {
        case 0:
            expect(ncclEpGetVersion(input_.rarely() ? nullptr : &version), "ncclEpGetVersion");
            break;
        case 1:
            expect(crossdockGroupMemory(choose_group().group, input_.rarely() ? nullptr : &symmetric, &local),
                   "crossdockGroupMemory");
            break;
        case 2:
            expect(crossdockGroupDiagnosis(choose_group().group, break_struct(diagnosis)), "crossdockGroupDiagnosis");
            break;
        case 3:
            expect(crossdockGroupMemoryUse(choose_group().group, break_struct(use)), "crossdockGroupMemoryUse");
            break;
        default:
            use_settings(*choose_handle());
    }
}

void Session::use_settings(Handle& handle) {
    const uint32_t value = input_.or_edge(input_.below(2));
    const uint32_t experts = handle.group.num_experts / static_cast<uint32_t>(num_ranks_);
    switch (input_.below(7)) {
        case 6:
            set_overlap(handle, value);
            break;
        case 0:
            expect(crossdockHandleSetSms(handle.handle, value), "crossdockHandleSetSms");
            expect(crossdockHandleSms(handle.handle, nullptr, nullptr, nullptr), "crossdockHandleSms");
            break;
        case 1:
            expect(crossdockHandleSetSums(handle.handle, static_cast<crossdockSums_t>(value)),
                   "crossdockHandleSetSums");
            break;
        case 2:
            expect(crossdockHandleSetTag(handle.handle, value), "crossdockHandleSetTag");
            break;
        case 3: {
            const uint32_t alignment = input_.or_edge(input_.below(9));
            const ncclResult_t result = crossdockHandleSetAlignment(handle.handle, alignment);
            expect(result, "crossdockHandleSetAlignment");
            if (result == ncclSuccess) handle.alignment = alignment;
            break;
        }
        case 4: {
            const size_t rows = size_t{handle.group.max_tokens} * static_cast<size_t>(num_ranks_);
            const ncclEpTensor_t* const tokens = tensor(ncclInt32, {experts, rows});
            const ncclEpTensor_t* const ranges = tensor(ncclInt64, {experts, static_cast<size_t>(num_ranks_)});
            expect(crossdockHandleSources(handle.handle, tokens, ranges, nullptr), "crossdockHandleSources");
            break;
        }
        default:
            expect(crossdockHandleRouting(handle.handle, tensor(ncclInt32, {handle.num_tokens, handle.topk}), nullptr),
                   "crossdockHandleRouting");
    }
}

// Only until the call has returned: no experts would ever count for a combine.
void Session::set_overlap(Handle& handle, uint32_t block_rows) {
    size_t words = 0;
    expect(crossdockOverlapWords(handle.handle, block_rows, input_.rarely() ? nullptr : &words),
           "crossdockOverlapWords");
    if (words == 0 || words > 4096) words = input_.below(64);
    Padded<crossdockOverlap_t> overlap;
    overlap.whole.block_rows = block_rows;
    overlap.whole.done_value = input_.below(3);
    if (!input_.rarely()) overlap.whole.memory = tensor(ncclInt32, {words});
    if (input_.below(2) == 1) overlap.whole.done = tensor(ncclUint32, {words});
    const ncclResult_t result = crossdockHandleSetOverlap(handle.handle, break_struct(overlap));
    expect(result, "crossdockHandleSetOverlap");
    if (result == ncclSuccess) expect(crossdockHandleSetOverlap(handle.handle, nullptr), "crossdockHandleSetOverlap");
}

void Session::use_communicators() {
    ncclComm_t comms[3] = {};
    int number = -1;
    void* memory = nullptr;
    ncclWindow_t window = nullptr;
    switch (input_.below(7)) {
        case 0: {
            const int count =
                input_.rarely() ? static_cast<int>(input_.or_edge(5000)) : static_cast<int>(input_.below(4));
            const bool has_room = count <= 3 || count > 4096;
            if (has_room && crossdockCommInitAll(input_.rarely() ? nullptr : comms, count) == ncclSuccess) {
                for (ncclComm_t comm : comms) {
                    if (comm != nullptr) {
                        expect(crossdockCommDestroy(comm), "crossdockCommDestroy");
                    }
                }
            }
            break;
        }
        case 1:
            expect(crossdockCommUserRank(input_.rarely() ? nullptr : comm_, input_.rarely() ? nullptr : &number),
                   "crossdockCommUserRank");
            break;
        case 2:
            expect(crossdockCommDestroy(sentinel<ncclComm_t>()), "crossdockCommDestroy");
            break;
        case 3:
            if (const size_t size = input_.byte();
                crossdockMemAlloc(input_.rarely() ? nullptr : &memory, size) == ncclSuccess) {
                expect(crossdockMemFree(memory), "crossdockMemFree");
            }
            expect(crossdockMemFree(&number), "crossdockMemFree");
            break;
        case 4: {
            ncclUniqueId id{};
            id.internal[input_.below(NCCL_UNIQUE_ID_BYTES)] = static_cast<char>(input_.byte());
            expect(crossdockCommInitRank(comms, static_cast<int>(input_.or_edge(2)), id,
                                         static_cast<int>(input_.or_edge(1))),
                   "crossdockCommInitRank");
            break;
        }
        case 5:
            expect(crossdockCommBarrier(comm_), "crossdockCommBarrier");
            break;
        default:
            expect(crossdockCommWindowRegister(comm_, window_memory_, input_.or_edge(0), &window,
                                               static_cast<int>(input_.or_edge(0))),
                   "crossdockCommWindowRegister");
            if (window != nullptr) {
                expect(crossdockCommWindowDeregister(comm_, window), "crossdockCommWindowDeregister");
            }
    }
}

}  // namespace crossdock::fuzz
