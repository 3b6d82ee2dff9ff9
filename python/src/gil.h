// SPDX-License-Identifier: Apache-2.0
//
// The interpreter's lock, let go while the library works or waits.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace crossdock::python {

// nanobind's gil_scoped_release, for threads that the interpreter's end overtakes too: Python 3.13 and older then ends
// the thread by unwinding it, which C++ between here and there would turn into an abort. It rests instead, as 3.14's
// do.
class ReleasedGil {
  public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ~ReleasedGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace crossdock::python
