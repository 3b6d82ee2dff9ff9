// SPDX-License-Identifier: Apache-2.0
// The blocks of rows that a dispatch tells the experts' kernel of (crossdock.h, crossdockOverlap_t).
#pragma once

#include <cstdint>

namespace crossdock {

struct RowBlocks {
    uint32_t* memory;  // OverlapLayout; null: a dispatch publishes nothing
    uint32_t zones;    // local experts, or source ranks
    uint32_t slots;    // rows that a zone has room for
    uint32_t blocks;   // of a zone
    uint32_t block_rows;
};

}  // namespace crossdock
