#include "runtime/forced_run.h"

#include <algorithm>

#include "kernels/elementwise.h"

namespace kvlm {

EncodedPrompt encode_prompt(Model& model, const std::vector<ChatMessage>& messages,
                            std::span<const Image> images, Stream& stream) {
  EncodedPrompt encoded;
  std::vector<VisualInput> inputs;
  std::vector<int> tokens;
  for (const Image& image : images) {
    give_up_if_cancelled(stream.watch());
    inputs.push_back(model.prepare(image));
    tokens.push_back(inputs.back().tokens);
  }
  encoded.prompt = make_prompt(model, messages, tokens);
  require_context(encoded.prompt, "", model, model.decoder().max_positions());
  std::vector<const VisualInput*> pictures;
  for (const VisualInput& input : inputs) pictures.push_back(&input);
  if (!pictures.empty()) encoded.visual = model.encode(pictures, stream, {});
  return encoded;
}

ForcedRun::ForcedRun(Model& model, KvCache& cache, const EncodedPrompt& encoded, int max_tokens,
                     Stream& stream)
    : model_(&model), cache_(&cache), stream_(&stream) {
  const Prompt& prompt = encoded.prompt;
  const auto rows = static_cast<int>(prompt.ids.size());
  const auto text = std::count(prompt.modality.begin(), prompt.modality.end(), kTextRow);
  id_ = cache.open({rows, rows - static_cast<int>(text), rows + max_tokens}, "the forced text");
  try {
    embedding_ = Tensor(DType::kF32, {1, model.decoder().hidden()}, stream.device());
    Tensor all(DType::kF32, {rows, model.decoder().hidden()}, stream.device());
    embed_prompt(model, prompt, 0, encoded.visual.pictures, all, stream);
    position_shift_ = prompt.next_position - rows;
    forward({id_, rows, true, true, prompt.modality}, prompt.positions, all);
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
                        Tensor& embeddings) {
  const ConstTensorView row = model_->decoder().forward(
      {std::span(&step, 1), positions, embeddings}, *cache_, *stream_, {});
  logits_.resize(static_cast<size_t>(model_->decoder().vocab_size()));
  copy(TensorView(logits_.data(), DType::kF32, row.shape()), row, *stream_);
}

}  // namespace kvlm
