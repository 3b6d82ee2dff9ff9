// SPDX-License-Identifier: Apache-2.0
#include "bench/npy.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace crossdock::bench {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
    throw std::runtime_error(fmt::format("--routing: {} {}", path, what));
}

std::string read_all(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    content << file.rdbuf();
    if (!file) {
        refuse(path, "cannot be read");
    }
    return content.str();
}

template <class Integer>
void append_values(const std::string& content, size_t offset, NpyMatrix& matrix) {
    for (size_t i = 0; i < matrix.num_rows * matrix.num_columns; ++i) {
        Integer value;
        std::memcpy(&value, content.data() + offset + i * sizeof value, sizeof value);
        matrix.values.push_back(value);
    }
}

}  // namespace

NpyMatrix read_npy(const std::string& path) {
    const std::string content = read_all(path);
    if (content.size() < 12 || content.compare(0, 6, "\x93NUMPY") != 0) {
        refuse(path, "is not a file in NumPy's format");
    }
    // Version 1 has a header length of two bytes, later ones of four.
    const auto byte = [&](size_t index) { return static_cast<size_t>(static_cast<unsigned char>(content[index])); };
    const bool is_short = byte(6) == 1;
    const size_t length = is_short ? byte(8) | byte(9) << 8 : byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24;
    const size_t start = is_short ? 10 : 12;
    if (length > content.size() - start) {
        refuse(path, "ends within its header");
    }
    const std::string header = content.substr(start, length);
    const size_t shape = header.find("'shape':");
    unsigned long long num_rows = 0;
    unsigned long long num_columns = 0;
    char closing = 0;
    if (shape == std::string::npos || header.find("'fortran_order': False") == std::string::npos ||
        std::sscanf(header.c_str() + shape, "'shape': ( %12llu , %6llu %c", &num_rows, &num_columns, &closing) != 3 ||
        closing != ')') {
        refuse(path, "is not a two-dimensional array in C order");
    }
    NpyMatrix matrix;
    matrix.num_rows = num_rows;
    matrix.num_columns = num_columns;
    const bool is_wide = header.find("'<i8'") != std::string::npos;
    if (!is_wide && header.find("'<i4'") == std::string::npos) {
        refuse(path, "holds neither int32 nor int64");
    }
    const size_t num_bytes = content.size() - start - length;
    if (matrix.num_columns == 0 || num_bytes / matrix.num_columns / (is_wide ? 8 : 4) < matrix.num_rows) {
        refuse(path, "is shorter than its shape says");
    }
    is_wide ? append_values<int64_t>(content, start + length, matrix)
            : append_values<int32_t>(content, start + length, matrix);
    return matrix;
}

}  // namespace crossdock::bench
