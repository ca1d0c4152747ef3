#pragma once

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/elementwise.h"
#include "tests/runtime/gates.h"
#include "tests/runtime/golden.h"
#include "tests/runtime/recording_model.h"

namespace kvlm::test {

/// A model whose conversation is written already: the case has template variables that a caller
/// cannot set, or a prompt that no template makes.
class WrittenPrompt final : public RecordingModel {
 public:
  WrittenPrompt(Model& model, std::string prompt)
      : RecordingModel(model), prompt_(std::move(prompt)) {}
  std::string render(const std::vector<ChatMessage>& /*messages*/) const override {
    return prompt_;
  }

 private:
  std::string prompt_;
};

/// One golden case of any family, step by step from its messages to logits.
class GoldenRun {
 public:
  GoldenRun(GoldenCase golden, std::shared_ptr<const LoadedModel> loaded)
      : golden_(std::move(golden)), owned_(std::move(loaded)), loaded_(*owned_) {
    for (const SafetensorsEntry& entry : tensors_.entries()) names_.insert(entry.name);
    if (!rendered()) written_.emplace(*loaded_, tensors_.text(golden_.tensor("prompt")));
  }

  Model& model() { return written_ ? static_cast<Model&>(*written_) : *loaded_; }
  bool rendered() const {
    return !golden_.entry.at("messages").is_null() && !golden_.entry.contains("template");
  }
  std::vector<ChatMessage> messages() const {
    return golden_.entry.at("messages").is_null() ? std::vector<ChatMessage>() : golden_.messages();
  }
  /// OneVision cuts pictures otherwise if they are given as the list of one prompt.
  size_t company() const { return golden_.entry.value("untiled", false) ? images_.size() : 1; }
  bool has(const std::string& what) const { return names_.contains(golden_.tapped(what)); }
  std::vector<float> floats(const std::string& what) const {
    return tensors_.floats(golden_.tapped(what));
  }
  std::vector<int32_t> greedy_ids() const {
    return narrow(tensors_.integers(golden_.tensor("greedy_ids")));
  }

  Prompt prompt() {
    PromptVisuals visuals;
    for (const Image& image : images_) {
      visuals.pictures.push_back(
          model().picture_text({image.height, image.width, image.name}, company()));
    }
    for (const DecodedClip& video : videos_) {
      visuals.clips.push_back(model().clip_text(video.clip));
    }
    return make_prompt(model(), outline_prompt(model(), messages(), visuals));
  }
  std::vector<VisualInput> inputs(const Prompt& prompt) {
    std::vector<VisualInput> inputs;
    for (const auto& [clip, index] : prompt.visuals) {
      inputs.push_back(clip ? model().prepare_clip(videos_[index])
                            : model().prepare(images_[index], company()));
    }
    return inputs;
  }
  VisualRows encode(const std::vector<VisualInput>& inputs, const Tap& tap) {
    std::vector<const VisualInput*> visuals;
    for (const VisualInput& input : inputs) visuals.push_back(&input);
    return visuals.empty() ? VisualRows() : model().encode(visuals, loaded_.stream(), tap);
  }
  /// Logits at the last prompt row and after each of `ids` but the last, fed one by one, on a cache
  /// of this format. The taps are those of the prompt; logits of all its rows are among them where
  /// the goldens have them.
  std::vector<std::vector<float>> forced_logits(std::span<const int32_t> ids, Taps& taps,
                                                std::string_view kv = "f32") {
    const Prompt prompt = this->prompt();
    const Tap tap = collect_on_host(taps);
    const VisualRows visual = encode(inputs(prompt), tap);
    Decoder& decoder = model().decoder();
    const auto rows = static_cast<int>(prompt.ids.size());
    const auto cache = loaded_.cache(kv, rows + static_cast<int>(ids.size()));
    const SequenceId id = cache->open({rows, 0, rows + static_cast<int>(ids.size())}, "forced");
    std::vector<std::vector<float>> logits;
    const auto run = [&](const DecoderStep& step, const Tap& step_tap) {
      const TensorView all = decoder.forward(step, *cache, loaded_.stream(), step_tap);
      const int64_t last = all.shape()[0] - 1;
      if (step.all_logits) step_tap("logits_prefill", all);
      logits.emplace_back(static_cast<size_t>(decoder.vocab_size()));
      copy(TensorView(logits.back().data(), DType::kF32, {1, decoder.vocab_size()}),
           all.slice(last, 1), loaded_.stream());
    };
    Tensor all(DType::kF32, {rows, decoder.hidden()}, test_device());
    const std::vector<AddedRows> added =
        embed_prompt(model(), prompt, 0, visual.each, all, loaded_.stream());
    tap("inputs_embeds", all);
    const StepRows first{id, rows, true, true, prompt.modality};
    run({{&first, 1}, prompt.positions, all, has("logits_prefill"), added}, tap);
    Tensor one(DType::kF32, {1, decoder.hidden()}, test_device());
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const Position position =
          Position::on_every_axis(prompt.next_position + static_cast<int32_t>(i));
      decoder.embed(ids.subspan(i, 1), one, loaded_.stream());
      const StepRows next{id, 1, false, false, {}};
      run({{&next, 1}, {&position, 1}, one}, {});
    }
    cache->close(id);
    return logits;
  }
  /// Taps of a device as those of the host.
  Tap collect_on_host(Taps& taps) {
    return [tap = collect(taps), &stream = loaded_.stream()](std::string_view name,
                                                             ConstTensorView view) {
      Tensor copied(view.dtype(), view.shape());
      copy(copied, view, stream);
      stream.synchronize();
      tap(name, copied);
    };
  }

 protected:
  const GoldenCase golden_;
  GoldenTensors tensors_{golden_.goldens / "golden.safetensors"};
  std::set<std::string> names_;
  const std::shared_ptr<const LoadedModel> owned_;
  const LoadedModel& loaded_;
  std::optional<WrittenPrompt> written_;
  const std::vector<Image> images_ = golden_.images();
  const std::vector<DecodedClip> videos_ = golden_.videos();
};

}  // namespace kvlm::test
