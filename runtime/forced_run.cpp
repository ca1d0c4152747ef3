#include "runtime/forced_run.h"

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

ForcedRun::ForcedRun(Model& model, KvCache& cache, const EncodedPrompt& encoded, int max_tokens,
                     Stream& stream)
    : model_(&model), cache_(&cache), stream_(&stream) {
  const Prompt& prompt = encoded.prompt;
  const auto rows = static_cast<int>(prompt.ids.size());
  id_ = cache.open({rows, static_cast<int>(prompt.visual_rows()), rows + max_tokens},
                   "the forced text");
  try {
    embedding_ = Tensor(DType::kF32, {1, model.decoder().hidden()}, stream.device());
    Tensor all(DType::kF32, {rows, model.decoder().hidden()}, stream.device());
    const std::vector<AddedRows> added =
        embed_prompt(model, prompt, 0, encoded.visual.each, all, stream);
    position_shift_ = prompt.next_position - rows;
    forward({id_, rows, true, true, prompt.modality}, prompt.positions, all, added);
  } catch (...) {
    cache.close(id_);
    throw;
  }
}

ForcedRun::~ForcedRun() { cache_->close(id_); }

void ForcedRun::feed(int32_t token) {
  const Position position = Position::on_every_axis(cache_->next_position(id_) + position_shift_);
  model_->decoder().embed(std::span(&token, 1), embedding_, *stream_);
  forward({id_, 1, false, false, {}}, std::span(&position, 1), embedding_);
}

void ForcedRun::forward(const StepRows& step, std::span<const Position> positions,
                        Tensor& embeddings, std::span<const AddedRows> added) {
  const ConstTensorView row = model_->decoder().forward(
      {std::span(&step, 1), positions, embeddings, false, added}, *cache_, *stream_, {});
  logits_.resize(static_cast<size_t>(model_->decoder().vocab_size()));
  copy(TensorView(logits_.data(), DType::kF32, row.shape()), row, *stream_);
}

}  // namespace kvlm
