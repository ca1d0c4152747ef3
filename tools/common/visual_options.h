#pragma once

#include <CLI/CLI.hpp>
#include <span>
#include <string>

#include "tools/common/session.h"
#include "vision/frame_sampling.h"

namespace kvlm {

/// --tiles, --min-pixels and --max-pixels: how large the pictures are that the tower sees.
void add_size_options(CLI::App& app, SessionOptions& options);

/// --fps and --frames: which frames of a video are taken.
void add_sampling_options(CLI::App& app, SamplingRequest& sampling);

/// Throws Error{kInvalidArgument} for both at once and for what no video can be sampled by.
void check_sampling(const SamplingRequest& sampling);

/// What makes a prompt with these clips fit: fewer frames, or `otherwise` where there are none to
/// spare.
std::string cure_of_long_prompt(std::span<const Clip> clips, const std::string& otherwise);

}  // namespace kvlm
