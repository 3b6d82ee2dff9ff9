// SPDX-License-Identifier: Apache-2.0
// What the fuzzer of the C API calls of crossdock/a2sgd.h: gradients of up to three pieces, halves of steps in any
// order.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <vector>

#include "crossdock/a2sgd.h"
#include "fuzz/input.h"

namespace crossdock::fuzz {

class A2sgdCalls {
  public:
    // expect(result, call): what must hold after any call.
    A2sgdCalls(ncclComm_t comm, Input& input, std::function<void(ncclResult_t, const char*)> expect)
        : comm_(comm), input_(input), expect_(std::move(expect)) {}

    void create();
    void make();  // one call or a few, as the input says
    void destroy_all();

  private:
    struct Made {
        crossdockA2sgd_t a2sgd = nullptr;
        uint64_t count = 0;       // entries
        bool is_between = false;  // the halves of a step
        uint64_t num_steps = 0;
    };

    std::vector<crossdockA2sgdPiece_t> make_pieces();
    // Live ones mostly; rarely none.
    Made* choose();
    void set_pieces(const Made& chosen);
    void begin(Made& chosen);
    void end(Made& chosen);
    void report(const Made& chosen);

    ncclComm_t comm_;
    Input& input_;
    std::function<void(ncclResult_t, const char*)> expect_;
    std::vector<Made> made_;
    std::list<std::vector<uint8_t>> gradients_;
};

}  // namespace crossdock::fuzz
