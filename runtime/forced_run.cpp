#include "runtime/forced_run.h"

#include <algorithm>

#include "kernels/elementwise.h"

namespace kvlm {

EncodedPrompt encode_prompt(Model& model, const std::vector<ChatMessage>& messages,
                            std::span<const Image> images, std::span<const DecodedClip> clips,
                            Stream& stream) {
  const PromptOutline outline = outline_prompt(model, messages, visual_texts(model, images, clips));
  require_context(outline, "", model, model.decoder().max_positions());
  EncodedPrompt encoded;
  encoded.prompt = make_prompt(model, outline);
  std::vector<VisualInput> inputs;
  for (const VisualPlace& place : outline.visuals) {
    give_up_if_cancelled(stream.watch());
    inputs.push_back(place.clip ? model.prepare_clip(clips[place.index])
                                : model.prepare(images[place.index], images.size()));
  }
  std::vector<const VisualInput*> visuals;
  for (const VisualInput& input : inputs) visuals.push_back(&input);
  if (!visuals.empty()) encoded.visual = model.encode(visuals, stream, {});
  return encoded;
}

ForcedRun::ForcedRun(Model& model, KvCache& cache, Stream& stream)
    : model_(&model), cache_(&cache), stream_(&stream) {}

ForcedRun::~ForcedRun() {
  for (const Sequence& sequence : sequences_) cache_->close(sequence.id);
}

SequenceId ForcedRun::join(const EncodedPrompt& encoded, int max_tokens) {
  const Prompt& prompt = encoded.prompt;
  const auto rows = static_cast<int>(prompt.ids.size());
  sequences_.reserve(sequences_.size() + 1);
  const SequenceId id = cache_->open(
      {rows, static_cast<int>(prompt.visual_rows()), rows + max_tokens}, "the reference text");
  sequences_.push_back({id, prompt.next_position - rows});
  Tensor all(DType::kF32, {rows, model_->decoder().hidden()}, stream_->device());
  const std::vector<AddedRows> added =
      embed_prompt(*model_, prompt, 0, encoded.visual.each, all, *stream_);
  const StepRows step{id, rows, true, true, prompt.modality};
  forward(std::span(&step, 1), prompt.positions, all, added);
  return id;
}

void ForcedRun::feed(std::span<const Token> tokens) {
  ids_.clear();
  rows_.clear();
  positions_.clear();
  for (const Token& token : tokens) {
    const auto at = std::find_if(sequences_.begin(), sequences_.end(),
                                 [&](const Sequence& x) { return x.id == token.sequence; });
    ids_.push_back(token.id);
    rows_.push_back({token.sequence, 1, false, false, {}});
    positions_.push_back(
        Position::on_every_axis(cache_->next_position(token.sequence) + at->position_shift));
  }
  const auto most = static_cast<int64_t>(sequences_.size());
  if (embeddings_.shape().rank() == 0 || embeddings_.shape()[0] < most) {
    embeddings_ = Tensor(DType::kF32, {most, model_->decoder().hidden()}, stream_->device());
  }
  const TensorView embeddings = embeddings_.view().slice(0, static_cast<int64_t>(ids_.size()));
  model_->decoder().embed(ids_, embeddings, *stream_);
  forward(rows_, positions_, embeddings);
}

std::span<const float> ForcedRun::logits(size_t i) const noexcept {
  const auto vocab = static_cast<size_t>(model_->decoder().vocab_size());
  return std::span(logits_).subspan(i * vocab, vocab);
}

void ForcedRun::forward(std::span<const StepRows> step, std::span<const Position> positions,
                        TensorView embeddings, std::span<const AddedRows> added) {
  const ConstTensorView rows =
      model_->decoder().forward({step, positions, embeddings, false, added}, *cache_, *stream_, {});
  logits_.resize(static_cast<size_t>(rows.elements()));
  copy(TensorView(logits_.data(), DType::kF32, rows.shape()), rows, *stream_);
}

}  // namespace kvlm
