// SPDX-License-Identifier: Apache-2.0
#include "fork_guard.h"

#include <pthread.h>

namespace crossdock::python {
namespace {

unsigned generation = 0;

const int registered = pthread_atfork(nullptr, nullptr, [] { ++generation; });

}  // namespace

unsigned process_generation() {
    static_cast<void>(registered);
    return generation;
}

}  // namespace crossdock::python
