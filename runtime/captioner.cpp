#include "runtime/captioner.h"

#include <algorithm>
#include <utility>

#include "kernels/base/error.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "runtime/family.h"
#include "runtime/generator.h"
#include "runtime/loading/checkpoint.h"
#include "runtime/prompt.h"
#include "runtime/spec_file.h"

namespace kvlm {

struct Captioner::State {
  State(const std::filesystem::path& folder, const CaptionerOptions& options)
      : pool(options.threads),
        stream(pool, options.device),
        spec(read_spec(options.kv)),
        checkpoint(folder) {
    stream.set_rounds_rows(options.load.dtype == DType::kBF16);
    ModelSource source = open_source(checkpoint, folder.string());
    const Family& family = family_of(source.config, source.name);
    // Before any weight is read.
    plan = plan_cache(spec, family.cache_shape(source.config));
    model = family.load(std::move(source), options.load, stream);
    plan->shape.multiply = model->decoder().cache_shape().multiply;  // what no config says
  }

  /// Answers `request`, which has its pictures and clips, to the question.
  std::string answer(GenerationRequest request, std::string_view question, int max_tokens,
                     const OnText& on_text);

  ThreadPool pool;
  Stream stream;
  CacheSpec spec;
  Checkpoint checkpoint;
  std::shared_ptr<CachePlan> plan;
  std::unique_ptr<Model> model;
  GenerationResult last;
};

Captioner::Captioner(const std::filesystem::path& checkpoint, const CaptionerOptions& options)
    : state_(std::make_unique<State>(checkpoint, options)) {}

Captioner::~Captioner() = default;

const GenerationResult& Captioner::last() const noexcept { return state_->last; }
Model& Captioner::model() noexcept { return *state_->model; }
Stream& Captioner::stream() noexcept { return state_->stream; }

std::string Captioner::describe(Image picture, std::string_view question, int max_tokens,
                                const OnText& on_text) {
  GenerationRequest request;
  request.id = picture.name.empty() ? "the image" : picture.name;
  request.images.push_back(std::move(picture));
  return state_->answer(std::move(request), question, max_tokens, on_text);
}

std::string Captioner::describe(DecodedClip clip, std::string_view question, int max_tokens,
                                const OnText& on_text) {
  GenerationRequest request;
  request.id = clip.clip.info.name.empty() ? "the video" : clip.clip.info.name;
  request.videos.push_back(std::move(clip));
  return state_->answer(std::move(request), question, max_tokens, on_text);
}

std::string Captioner::State::answer(GenerationRequest request, std::string_view question,
                                     int max_tokens, const OnText& on_text) {
  last = {};
  request.messages.push_back(user_message(
      question.empty() ? default_question(*model, request.images.size(), request.videos.size())
                       : std::string(question),
      request.images.size(), model->image_token(), request.videos.size(), model->video_token()));
  const PromptOutline outline = outline_prompt(
      *model, request.messages, visual_texts(*model, request.images, request.videos));
  request.sampling = model->defaults().sampling;
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens > 0 ? max_tokens : model->defaults().max_tokens;

  const int64_t rows =
      std::min<int64_t>(outline.rows + request.max_tokens, model->decoder().max_positions());
  const auto cache =
      make_cache(plan, session_bytes(*plan, static_cast<int>(rows)), stream.device());
  Generator generator(*model, *cache, stream);
  const int key = generator.admit(
      std::move(request), on_text ? on_text : [](std::string_view) {});
  generator.deliver();
  while (!generator.finished(key)) {
    generator.step();
    generator.deliver();
  }
  last = generator.take(key);
  return last.text;
}

}  // namespace kvlm
