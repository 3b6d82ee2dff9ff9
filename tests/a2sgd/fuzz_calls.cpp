// SPDX-License-Identifier: Apache-2.0
#include "tests/a2sgd/fuzz_calls.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fuzz/padded.h"

namespace crossdock::fuzz {
namespace {

[[noreturn]] void violate(const char* what) {
    std::fprintf(stderr, "FAILED: A2SGD: %s\n", what);
    std::abort();
}

size_t bytes_of_type(ncclDataType_t type) { return type == ncclFloat16 || type == ncclBfloat16 ? 2 : 4; }

}  // namespace

std::vector<crossdockA2sgdPiece_t> A2sgdCalls::make_pieces() {
    static constexpr ncclDataType_t kTypes[] = {ncclFloat32, ncclBfloat16, ncclFloat16, ncclFloat32};
    std::vector<crossdockA2sgdPiece_t> pieces(1 + input_.below(3));
    for (crossdockA2sgdPiece_t& piece : pieces) {
        piece.datatype = input_.rarely() ? static_cast<ncclDataType_t>(input_.byte()) : kTypes[input_.below(4)];
        // Beyond a row of columns; beyond a chunk, and a segment of them.
        static constexpr uint32_t kSteps[] = {1, 5, 40, 140};
        piece.count = input_.byte() * kSteps[input_.below(4)];
        piece.name = input_.below(2) == 0 ? nullptr : "layer";
        std::vector<uint8_t>& memory = gradients_.emplace_back(piece.count * bytes_of_type(piece.datatype));
        // Any bits are a number, or none: mostly those that are one in every type.
        const uint8_t top = input_.byte();
        for (size_t i = 0; i < memory.size(); ++i)
            memory[i] = static_cast<uint8_t>(i % 2 == 1 && top < 240 ? (i * 31 & 0x80u) | (top & 0x3fu) : i * 37 + top);
        piece.data = memory.empty() ? nullptr : memory.data();
        if (!input_.rarely()) continue;
        switch (input_.below(3)) {
            case 0:
                piece.data = nullptr;
                break;
            case 1:
                piece.data = memory.data() + 1;
                piece.count = piece.count > 0 ? piece.count - 1 : 0;
                break;
            default:
                piece.count = ~size_t{0} >> input_.below(3);
        }
    }
    return pieces;
}

A2sgdCalls::Made* A2sgdCalls::choose() {
    static thread_local Made none;
    none = {};
    const uint32_t choice = input_.below(static_cast<uint32_t>(made_.size()) + 1);
    if (made_.empty() || (choice == made_.size() && input_.rarely())) return &none;
    return &made_[choice % made_.size()];
}

void A2sgdCalls::create() {
    const std::vector<crossdockA2sgdPiece_t> pieces = make_pieces();
    Padded<crossdockA2sgdConfig_t> config;
    config.whole.sums = static_cast<crossdockA2sgdSums_t>(input_.or_edge(input_.below(2)));
    config.whole.skip_nonfinite = static_cast<int>(input_.or_edge(input_.below(2)));
    config.whole.lsa_team_size = input_.rarely() ? input_.or_edge(1) : input_.below(2);
    config.whole.timeout_ns = 1'000'000'000;
    crossdockA2sgd_t const before = reinterpret_cast<crossdockA2sgd_t>(uintptr_t{0x5a5a5a5a5a5a5a5a});
    const size_t num_pieces = input_.rarely() ? ~size_t{0} >> input_.below(64) : pieces.size();
    Made made{before, 0, false, 0};
    for (const crossdockA2sgdPiece_t& piece : pieces) made.count += piece.count;
    // As many as there are, or more than can be.
    const size_t given_pieces = num_pieces <= pieces.size() || num_pieces > 16'777'214 ? num_pieces : pieces.size();
    if (given_pieces < pieces.size()) made.count = 0;
    const ncclResult_t result =
        crossdockA2sgdCreate(input_.rarely() ? nullptr : &made.a2sgd, input_.rarely() ? nullptr : comm_,
                             input_.rarely() ? nullptr : pieces.data(), given_pieces,
                             input_.below(3) == 0 ? nullptr : break_struct(input_, config));
    if (result != ncclSuccess && made.a2sgd != before) violate("a failed creation has written its output");
    expect_(result, "crossdockA2sgdCreate");
    if (result != ncclSuccess) return;
    // A new object may have the address of one that was destroyed, which is the same then.
    std::erase_if(made_, [&](const Made& each) { return each.a2sgd == made.a2sgd; });
    made_.push_back(made);
}

// Mostly of as many entries as there were.
void A2sgdCalls::set_pieces(const Made& chosen) {
    std::vector<crossdockA2sgdPiece_t> pieces = make_pieces();
    if (input_.below(4) != 0 && chosen.count < (1u << 17)) {
        std::vector<uint8_t>& memory = gradients_.emplace_back(chosen.count * 4);
        pieces = {{memory.data(), chosen.count, ncclFloat32, "moved"}};
    }
    const ncclResult_t result = crossdockA2sgdSetPieces(chosen.a2sgd, pieces.data(), pieces.size());
    if (result == ncclSuccess && chosen.is_between) violate("pieces have moved within a step");
    expect_(result, "crossdockA2sgdSetPieces");
}

void A2sgdCalls::begin(Made& chosen) {
    const ncclResult_t result = crossdockA2sgdBegin(chosen.a2sgd, nullptr);
    if (result == ncclSuccess && chosen.is_between) violate("a step has begun twice");
    expect_(result, "crossdockA2sgdBegin");
    chosen.is_between |= result == ncclSuccess;
}

void A2sgdCalls::end(Made& chosen) {
    const std::list<std::vector<uint8_t>> before = gradients_;
    const ncclResult_t result = crossdockA2sgdEnd(chosen.a2sgd, nullptr);
    if (result == ncclSuccess && !chosen.is_between) violate("a step has ended that had not begun");
    if (result != ncclSuccess && gradients_ != before) violate("an end that failed has moved a gradient");
    expect_(result, "crossdockA2sgdEnd");
    if (result != ncclSuccess) return;
    chosen.is_between = false;
    ++chosen.num_steps;
}

void A2sgdCalls::report(const Made& chosen) {
    Padded<crossdockA2sgdReport_t> report;
    crossdockA2sgdReport_t* const given = break_struct(input_, report);
    const ncclResult_t result = crossdockA2sgdReport(chosen.a2sgd, given);
    expect_(result, "crossdockA2sgdReport");
    if (result != ncclSuccess) return;
    if (given->step != chosen.num_steps) violate("the report is not of the last step");
    if (given->step > 0 && given->num_nonnegative > given->count) violate("more entries are counted than there are");
    if (given->nonfinite_name != nullptr && std::strlen(given->nonfinite_name) == 0) violate("a piece has no name");
}

void A2sgdCalls::make() {
    switch (made_.empty() ? input_.below(2) * 6 : input_.below(8)) {
        case 0:
            create();
            break;
        case 1:
            set_pieces(*choose());
            break;
        case 2:
            begin(*choose());
            break;
        case 3:
            end(*choose());
            break;
        case 4: {
            Made& chosen = *choose();
            begin(chosen);
            end(chosen);
            break;
        }
        case 5:
            report(*choose());
            break;
        case 6:
            // The list keeps it: what is destroyed must be refused from then on.
            expect_(crossdockA2sgdDestroy(choose()->a2sgd), "crossdockA2sgdDestroy");
            break;
        default: {
            Made& chosen = *choose();
            begin(chosen);
            report(chosen);
            end(chosen);
            report(chosen);
        }
    }
}

void A2sgdCalls::destroy_all() {
    for (const Made& each : made_) crossdockA2sgdDestroy(each.a2sgd);
}

}  // namespace crossdock::fuzz
