#pragma once

#include <memory>
#include <optional>

#include "llm/tokenizer.h"
#include "runtime/chat_template.h"
#include "runtime/loading/source.h"

namespace kvlm {

/// tokenizer_config.json and its companions; what is not there takes its default.
TokenizerConfig read_tokenizer_config(const ModelSource& source);

/// The tokenizer of a checkpoint: tokenizer.json as written, else tokenizer.model or vocab.json
/// with merges.txt, with the added tokens of their companions. A tokenizer.model knows no
/// `placeholder`; unless a companion gives it an id, it has the one of config.json, if that has
/// one.
std::unique_ptr<Tokenizer> load_tokenizer(const ModelSource& source, TokenizerConfig config,
                                          const std::optional<AddedToken>& placeholder);

/// Throws Error{kCorruptFile} unless the tokenizer makes `placeholder` of its text: the template
/// writes it, the tokenizer makes an id of it, and `key` of config.json says which.
void check_placeholder(const Tokenizer& tokenizer, const AddedToken& placeholder,
                       std::string_view key);

/// The chat template of a checkpoint (the first, in transformers' order, of processor_config.json,
/// chat_template.json, chat_template.jinja, tokenizer_config.json), or `builtin` if it has none.
/// Throws Error{kCorruptFile} if that is empty too.
ChatTemplate load_chat_template(const ModelSource& source, std::string_view builtin);

}  // namespace kvlm
