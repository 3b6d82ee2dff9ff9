// SPDX-License-Identifier: Apache-2.0
// The live groups and handles behind the API's opaque pointers.
#pragma once

#include "core/group.h"
#include "core/handle.h"
#include "core/registry.h"

namespace crossdock {

inline Registry<Group>& groups() {
    static auto* const registry = new Registry<Group>("ep_group");
    return *registry;
}
inline Registry<Handle>& handles() {
    static auto* const registry = new Registry<Handle>("handle");
    return *registry;
}
inline const MadeAtLoad groups_made_at_load(groups);
inline const MadeAtLoad handles_made_at_load(handles);

}  // namespace crossdock
