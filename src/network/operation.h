// SPDX-License-Identifier: Apache-2.0
// Pending operations, and the frames that they send.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "network/frame.h"
#include "network/payload.h"
#include "network/region.h"

namespace crossdock::network {

class Mesh;

// A range of registered memory, here or at a peer.
struct Span {
    Region* region;
    uint64_t offset;
    uint64_t bytes;
};

// A value that is added to a word of the target's memory. Without a region: no signal.
struct Signal {
    Region* region;
    uint64_t offset;
    uint64_t value;
    bool is_strong;
};

struct Operation {
    enum class Kind : uint8_t { kPut, kGet, kFlush, kReply };
    Kind kind;
    bool has_ended;
    bool is_pumping;  // pump() is running
    bool is_starved;  // waits for staging memory
    uint32_t peer;
    uint32_t context;
    uint64_t number;  // in its channel
    Region* region;   // the source, or a get's target
    std::byte* address;
    uint64_t bytes;
    uint64_t piece_bytes;
    uint64_t begun;       // pieces started; get: bytes received
    uint64_t remaining;   // pieces not yet sent; get: bytes not yet landed
    uint32_t under_way;   // pieces being sent
    FrameHeader pattern;  // header of its frames, if they are several or staged

    void renew() {
        has_ended = is_pumping = is_starved = false;
        region = nullptr;
        address = nullptr;
        bytes = piece_bytes = begun = remaining = 0;
        under_way = 0;
    }
};

struct OutFrame {
    static constexpr size_t kSmallBytes = 64;

    Send send;
    FrameHeader header;
    Mesh* mesh;
    Operation* operation;      // null: a header only, or a copy
    const std::byte* staging;  // to be returned; may be null
    uint32_t peer;
    alignas(8) std::byte small[kSmallBytes];  // copied bytes, if they fit
    std::vector<std::byte> copy;              // else

    void renew() {
        send.bytes = {};
        send.arrives_whole = false;
        operation = nullptr;
        staging = nullptr;
    }
};

// A pool of reusable objects, freed together. take() calls renew(); the caller sets the other fields.
template <class Object>
class Pool {
  public:
    Object* take() {
        if (free_.empty()) {
            all_.push_back(std::make_unique<Object>());
            free_.push_back(all_.back().get());
        }
        Object* object = free_.back();
        free_.pop_back();
        object->renew();
        return object;
    }
    void give_back(Object* object) { free_.push_back(object); }

  private:
    std::vector<std::unique_ptr<Object>> all_;
    std::vector<Object*> free_;
};

using OperationPool = Pool<Operation>;
using OutFramePool = Pool<OutFrame>;

}  // namespace crossdock::network
