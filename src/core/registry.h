// SPDX-License-Identifier: Apache-2.0
// Live objects behind the API's opaque pointers. An unknown pointer is refused with a message, so use after destroy is
// an error, not a crash; so is use of a parent's object in a forked child.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "core/error.h"
#include "core/process.h"

namespace crossdock {

template <typename Object>
class Registry {
  public:
    explicit Registry(const char* name) : name_(name) {}

    void* add(std::shared_ptr<Object> object) {
        void* pointer = object.get();
        std::unique_lock lock(mutex_);
        live_.insert_or_assign(pointer, Entry{std::move(object), {}});
        return pointer;
    }

    std::shared_ptr<Object> find(const void* pointer) const {
        std::shared_lock lock(mutex_);
        return entry_of(pointer)->second.object;
    }

    // Those of this process.
    std::vector<std::shared_ptr<Object>> all() const {
        std::shared_lock lock(mutex_);
        std::vector<std::shared_ptr<Object>> objects;
        for (const auto& [pointer, entry] : live_) {
            if (entry.maker.is_this()) objects.push_back(entry.object);
        }
        return objects;
    }

    // If several threads remove one object, one gets it and the others get the error.
    std::shared_ptr<Object> remove(const void* pointer) {
        std::unique_lock lock(mutex_);
        const auto entry = entry_of(pointer);
        std::shared_ptr<Object> object = entry->second.object;
        live_.erase(entry);
        return object;
    }

  private:
    struct Entry {
        std::shared_ptr<Object> object;
        MakerProcess maker;
    };

    auto entry_of(const void* pointer) const {
        require(pointer != nullptr, ncclInvalidArgument, "{} is NULL", name_);
        const auto found = live_.find(pointer);
        require(found != live_.end(), ncclInvalidArgument,
                "{} {} is not a live {}: never created, or already destroyed", name_, pointer, name_);
        if (!found->second.maker.is_this()) found->second.maker.expect_this(fmt::format("{} {}", name_, pointer));
        return found;
    }

    const char* name_;
    mutable ForkSafeMutex mutex_;
    std::unordered_map<const void*, Entry> live_;
};

}  // namespace crossdock
