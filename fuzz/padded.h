// SPDX-License-Identifier: Apache-2.0
// Structs of the API, right and wrong.
#pragma once

#include <cstring>

#include "fuzz/input.h"
#include "nccl_ep.h"

namespace crossdock::fuzz {

// A struct of the API with something behind it that is not zero, as in a caller of a later version.
template <class Struct>
struct Padded {
    Struct whole{};
    unsigned char tail[32];

    Padded() {
        whole.size = sizeof(Struct);
        whole.magic = NCCL_EP_MAGIC;
        std::memset(tail, 0xee, sizeof tail);
    }
};

// As it is, or rarely NULL, with a wrong magic or another size.
template <class Struct>
Struct* break_struct(Input& input, Padded<Struct>& padded) {
    if (!input.rarely()) return &padded.whole;
    switch (input.below(3)) {
        case 0:
            return nullptr;
        case 1:
            padded.whole.magic ^= 1u << input.below(32);
            break;
        default:
            padded.whole.size = input.byte();
    }
    return &padded.whole;
}

}  // namespace crossdock::fuzz
