// SPDX-License-Identifier: Apache-2.0
// The run, told to people and to machines.
#pragma once

#include <string>

#include "demo/options.h"
#include "demo/summary.h"
#include "demo/text.h"

namespace crossdock::demo {

// What will be done; before the run.
void print_heading(const Options& options, const Text& text, size_t num_tokens, int num_steps);

// The report on stdout, at most 100 columns wide, ending with one line PASS or FAIL.
void print_report(const Options& options, const Summary& summary);

// Throws std::runtime_error with a message where the file cannot be written.
void write_json(const std::string& path, const Options& options, const Text& text, const Summary& summary);

}  // namespace crossdock::demo
