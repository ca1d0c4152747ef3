#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "runtime/generator.h"
#include "tools/common/session.h"

namespace kvlm {

/// The object that --json prints and a batch record carries, with what is held in memory at the
/// time (tools/common/memory.h), what was taken of each video, and what of the files was lost.
nlohmann::ordered_json result_json(const GenerationResult& result, const Session& session,
                                   const Model& model, const std::string& spec,
                                   std::span<const Clip> clips,
                                   std::span<const std::string> warnings);

/// Why the answer ended before max_tokens, if its context was full: at most one sentence.
std::vector<std::string> full_context_warning(const GenerationResult& result, Model& model,
                                              int max_tokens);

/// The four lines that follow an answer on stderr, and one for each video.
std::string summary(const GenerationResult& result, const Session& session, const Model& model,
                    const std::string& spec, std::span<const Clip> clips);

/// One line of JSON; bytes that are not UTF-8 become U+FFFD.
std::string json_line(const nlohmann::ordered_json& json);

}  // namespace kvlm
