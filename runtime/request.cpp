#include "runtime/request.h"

#include <chrono>
#include <utility>

#include "runtime/placeholders.h"

namespace kvlm {

namespace {

using Clock = std::chrono::steady_clock;

VisualInput cut(const Model& model, GenerationRequest& request, const VisualPlace& place) {
  if (place.clip) {
    DecodedClip& clip = request.videos[place.index];
    VisualInput input = model.prepare_clip(clip);
    clip.frames.clear();  // whose memory the next picture may need
    return input;
  }
  Image& image = request.images[place.index];
  VisualInput input = model.prepare(image, request.images.size());
  image.rgb = decltype(image.rgb)();
  return input;
}

}  // namespace

Prompt prepare_turn(Model& model, GenerationRequest& request, int context, const Watch* watch,
                    std::vector<VisualInput>& visuals) {
  const PromptVisuals texts = visual_texts(model, request.images, request.videos);
  const PromptOutline outline = outline_prompt(model, request.messages, texts);
  require_context(outline, request.id, model, context);
  Prompt prompt = make_prompt(model, outline);
  for (size_t i = 0; i < outline.visuals.size(); ++i) {
    const VisualPlace& place = outline.visuals[i];
    const int64_t rows = (place.clip ? texts.clips : texts.pictures)[place.index].rows();
    // One of several pictures may be cut otherwise than one alone.
    if (i < visuals.size() && visuals[i].rows == rows) continue;
    give_up_if_cancelled(watch);
    VisualInput input = cut(model, request, place);
    if (i < visuals.size()) {
      visuals[i] = std::move(input);
    } else {
      visuals.push_back(std::move(input));
    }
  }
  return prompt;
}

PreparedRequest prepare_request(Model& model, GenerationRequest request, int context,
                                const Watch* watch) {
  const Clock::time_point start = Clock::now();
  PreparedRequest prepared;
  prepared.request = std::move(request);
  prepared.context = context;
  prepared.warnings = foreign_placeholders(model, prepared.request.messages);
  prepared.prompt = prepare_turn(model, prepared.request, context, watch, prepared.visuals);
  prepared.milliseconds = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  return prepared;
}

}  // namespace kvlm
