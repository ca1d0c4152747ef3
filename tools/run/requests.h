#pragma once

#include <string>
#include <vector>

#include "runtime/prompt.h"
#include "runtime/request.h"
#include "tools/run/options.h"
#include "tools/run/prepared_records.h"
#include "tools/run/records.h"

namespace kvlm {

/// What the records of a batch, and the images of the command line, become for a model. Any thread
/// may use it.
class Requests {
 public:
  /// Both must outlive it.
  Requests(const RunOptions& options, Model& model) : options_(options), model_(model) {}

  /// Reads the headers of its images and videos. Throws Error if one cannot be read, or the context
  /// does not hold the prompt: before a pixel is decoded.
  OpenRecord open(const Record& record) const;
  /// Decodes, cuts and tokenises it.
  PreparedRecord prepare(const Record& record, const OpenRecord& open, const Watch& watch) const;

  /// The prompt of the command line's question about these. Throws as open().
  PromptOutline outline(const std::vector<PictureShape>& images,
                        const std::vector<Clip>& clips) const;

  /// What is asked about so many of them: `prompt`, else -p, else for a caption.
  std::vector<ChatMessage> conversation(const std::string& prompt, size_t images,
                                        size_t videos) const;
  /// Tokens that the prompt and its answer take at most, within the context.
  int rows(const PromptOutline& outline) const;
  int max_tokens() const { return options_.max_tokens.value_or(model_.defaults().max_tokens); }
  int context() const { return model_.decoder().max_positions(); }
  /// Fit for messages.
  static std::string name_of(const Record& record);

 private:
  PromptOutline outline(const std::string& prompt, const std::vector<PictureShape>& images,
                        const std::vector<Clip>& clips, const std::string& who,
                        const char* cure) const;

  const RunOptions& options_;
  Model& model_;
};

}  // namespace kvlm
