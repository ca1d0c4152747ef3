#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/elementwise.h"
#include "runtime/model.h"

namespace kvlm::test {

/// A model that writes down what passes through it: the logits of every sequence of every forward
/// pass, and how many pictures were encoded. Everything else is the model's own.
class RecordingModel : public Model {
 public:
  explicit RecordingModel(Model& model) : model_(&model), decoder_(model.decoder()) {}

  /// What one forward pass gave one sequence.
  struct Pass {
    SequenceId sequence{};
    int rows = 0;               // fed
    std::vector<float> logits;  // (vocab,) after the last of them
  };

  std::vector<Pass>& passes() noexcept { return decoder_.passes; }
  /// Called with the step of every forward pass before it runs; may throw in its place.
  void set_before(std::function<void(const DecoderStep& step)> before) {
    decoder_.before = std::move(before);
  }
  int encoded() const noexcept { return encoded_; }
  int prepared() const noexcept { return prepared_; }
  int sampled() const noexcept { return sampled_; }  // videos

  std::string_view name() const noexcept override { return model_->name(); }
  std::string_view family() const noexcept override { return model_->family(); }
  DType dtype() const noexcept override { return model_->dtype(); }
  size_t weight_bytes() const noexcept override { return model_->weight_bytes(); }
  const Tokenizer& tokenizer() const noexcept override { return model_->tokenizer(); }
  Decoder& decoder() noexcept override { return decoder_; }
  const GenerationDefaults& defaults() const noexcept override { return model_->defaults(); }
  std::string_view caption_prompt() const noexcept override { return model_->caption_prompt(); }
  std::string_view image_token() const noexcept override { return model_->image_token(); }
  std::string_view video_token() const noexcept override { return model_->video_token(); }
  bool is_visual(int32_t id) const noexcept override { return model_->is_visual(id); }
  VisualText picture_text(const PictureShape& shape, size_t pictures) const override {
    return model_->picture_text(shape, pictures);
  }
  VisualInput prepare(const Image& image, size_t pictures) const override {
    ++prepared_;
    return model_->prepare(image, pictures);
  }
  std::vector<int64_t> sample_frames(const VideoInfo& info,
                                     const SamplingRequest& request) const override {
    ++sampled_;
    return model_->sample_frames(info, request);
  }
  VisualText clip_text(const Clip& clip) const override { return model_->clip_text(clip); }
  Image fit_frame(const Clip& clip, Image frame) const override {
    return model_->fit_frame(clip, std::move(frame));
  }
  VisualInput prepare_clip(const DecodedClip& clip) const override {
    ++prepared_;
    return model_->prepare_clip(clip);
  }
  VisualRows encode(std::span<const VisualInput* const> visuals, Stream& stream,
                    const Tap& tap) override {
    encoded_ += static_cast<int>(visuals.size());
    return model_->encode(visuals, stream, tap);
  }
  PromptPositions positions(std::span<const PositionSpan> spans) const override {
    return model_->positions(spans);
  }
  std::string render(const std::vector<ChatMessage>& messages) const override {
    return model_->render(messages);
  }

 private:
  struct RecordingDecoder final : Decoder {
    explicit RecordingDecoder(Decoder& inner) : decoder(&inner) {}

    CacheShape cache_shape() const override { return decoder->cache_shape(); }
    int hidden() const noexcept override { return decoder->hidden(); }
    int vocab_size() const noexcept override { return decoder->vocab_size(); }
    int max_positions() const noexcept override { return decoder->max_positions(); }
    int sliding_window() const noexcept override { return decoder->sliding_window(); }
    int settled_positions() const noexcept override { return decoder->settled_positions(); }
    DType weight_dtype() const noexcept override { return decoder->weight_dtype(); }
    size_t weight_bytes() const noexcept override { return decoder->weight_bytes(); }
    size_t step_weight_bytes() const noexcept override { return decoder->step_weight_bytes(); }
    size_t workspace_bytes(int64_t) const noexcept override { return 0; }
    void embed(std::span<const int32_t> ids, TensorView out, Stream& stream) override {
      decoder->embed(ids, out, stream);
    }
    TensorView forward(const DecoderStep& step, KvCache& cache, Stream& stream,
                       const Tap& tap) override {
      if (before) before(step);
      const TensorView logits = decoder->forward(step, cache, stream, tap);
      int64_t row = 0;
      for (const StepRows& rows : step.sequences) {
        row += step.all_logits ? rows.rows : 1;
        std::vector<float> last(static_cast<size_t>(decoder->vocab_size()));
        copy(TensorView(last.data(), DType::kF32, {1, decoder->vocab_size()}),
             logits.slice(row - 1, 1), stream);
        passes.push_back({rows.sequence, rows.rows, std::move(last)});
      }
      return logits;
    }

    Decoder* decoder;
    std::vector<Pass> passes;
    std::function<void(const DecoderStep& step)> before;
  };

  Model* model_;
  RecordingDecoder decoder_;
  int encoded_ = 0;
  mutable std::atomic<int> prepared_ = 0;
  mutable std::atomic<int> sampled_ = 0;
};

}  // namespace kvlm::test
