// SPDX-License-Identifier: Apache-2.0
// NumPy's file format, as far as recorded routings need it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace crossdock::bench {

struct NpyMatrix {
    size_t num_rows = 0;
    size_t num_columns = 0;
    std::vector<int64_t> values;  // row by row
};

// A two-dimensional array of little-endian int32 or int64 in C order, format version 1 to 3. Throws with a message.
NpyMatrix read_npy(const std::string& path);

}  // namespace crossdock::bench
