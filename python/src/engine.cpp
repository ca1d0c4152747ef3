#include "python/src/engine.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "kernels/base/queue.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "kvcache/spec/spec.h"
#include "python/src/outside.h"
#include "runtime/clip_file.h"
#include "runtime/policy_profile.h"
#include "runtime/prompt.h"
#include "runtime/spec_file.h"
#include "tools/common/room.h"
#include "tools/common/visual_options.h"
#include "tools/run/report.h"

// What vlm-run and vlm-serve do with a question, for callers in Python: its size is known from
// headers, it waits in the service's queue, and its images are decoded when its turn comes.
namespace kvlm::python {

namespace {

size_t default_cache_bytes(Session& session) {
  const size_t wanted =
      session_bytes(*session.plan(), session.model().decoder().max_positions(), 8);
  const bool gpu = session.device().kind != DeviceKind::kCpu;
  const size_t there = gpu ? cuda::device_facts(session.device().index).free_bytes : memory_limit();
  return std::min(wanted, there / 4);
}

template <class T>
void require(const char* name, const std::optional<T>& value, bool legal, const char* expected) {
  if (!value || legal) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is {}; expected {}", name, *value, expected));
}

void check(const Question& asked) {
  const auto temperature = asked.temperature.value_or(0);
  require("temperature", asked.temperature, temperature >= 0 && temperature <= 1000, "0 to 1000");
  const auto top_p = asked.top_p.value_or(1);
  require("top_p", asked.top_p, top_p > 0 && top_p <= 1, "more than 0 and at most 1");
  require("top_k", asked.top_k, asked.top_k.value_or(0) >= 0, "0 (all) or more");
  require("repetition_penalty", asked.repetition_penalty, asked.repetition_penalty.value_or(1) > 0,
          "more than 0");
  require("max_tokens", asked.max_tokens, asked.max_tokens.value_or(1) > 0, "1 or more");
  require("logprobs", asked.logprobs, asked.logprobs.value_or(0) >= 0, "0 or more");
}

[[noreturn]] void refuse_after_fork() {
  throw Error(ErrorCode::kUnsupported,
              "the model was made before a fork; start processes by spawn, or make it in each");
}

[[noreturn]] void refuse_closed() {
  throw Error(ErrorCode::kInvalidArgument, "the model is closed; make another one");
}

}  // namespace

Answer::~Answer() {
  if (process_ == getpid()) ticket_->cancel();
}

Ticket& Answer::ticket() const {
  if (process_ != getpid()) refuse_after_fork();
  return *ticket_;
}

Engine::Engine(const SessionOptions& options, std::optional<size_t> cache_bytes, Watch* watch)
    : process_(getpid()),
      options_(options),
      session_(std::make_unique<Session>(options, watch)),
      model_(&session_->model()) {
  session_->stream().set_watch(nullptr);
  Service::Settings settings;
  settings.cache_bytes = cache_bytes.value_or(default_cache_bytes(*session_));
  settings.most_waiting = SIZE_MAX;
  settings.decode_share = 0;  // whoever asks for many wants them soon
  const bool gpu = session_->device().kind != DeviceKind::kCpu;
  settings.preparing_threads = gpu ? std::min(session_->threads(), 16) : 0;
  plans_[session_->plan()->spec] = session_->plan();
  service_ = std::make_shared<Service>(session_->model(), session_->stream(), settings);
  cache_bytes_ = service_->status().capacity_bytes;
}

Engine::~Engine() {
  if (process_ != getpid()) {  // the threads of a parent are not in its child
    static_cast<void>(new std::shared_ptr<Service>(std::move(service_)));
    static_cast<void>(session_.release());
    return;
  }
  if (service_ && service_->is_own_thread()) {  // Python collects it while a rule runs
    const auto outside = std::make_shared<Outside>();
    std::thread([outside, service = std::move(service_), session = std::move(session_)]() mutable {
      service.reset();
      session.reset();
    }).detach();
    return;
  }
  // A rule of Python's may be waiting for its turn.
  std::optional<nanobind::gil_scoped_release> release;
  if (PyGILState_Check() != 0) release.emplace();
  close();
}

void Engine::close() {
  if (process_ != getpid()) return;
  std::shared_ptr<Service> service;
  {
    const std::scoped_lock lock(mutex_);
    if (service_ && service_->is_own_thread()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "a rule closes the model that is waiting for it; close it afterwards");
    }
    service = std::move(service_);
  }
  if (service) service->drain(std::chrono::milliseconds(0));
}

std::shared_ptr<Service> Engine::service() const {
  if (process_ != getpid()) refuse_after_fork();
  const std::scoped_lock lock(mutex_);
  if (!service_) refuse_closed();
  if (service_->is_own_thread()) {
    throw Error(ErrorCode::kInvalidArgument,
                "a rule asks the model that is waiting for it; ask it before or afterwards");
  }
  return service_;
}

std::shared_ptr<const CachePlan> Engine::plan_of(const std::string& text) {
  if (text.empty()) return session_->plan();
  const CacheSpec spec = read_spec(text);
  const std::string name = canonical(spec);
  const std::scoped_lock lock(mutex_);
  if (const auto found = plans_.find(name); found != plans_.end()) return found->second;
  PolicyProfile profile;
  if (!options_.kv_profile.empty()) profile = read_profile(options_.kv_profile);
  return plans_[name] = plan_cache(spec, session_->plan()->shape, &profile);
}

std::shared_ptr<CachedPrompt> Answer::cached() const {
  static_cast<void>(ticket().result());
  if (!cached_ || cached_->layers.empty()) {
    throw Error(ErrorCode::kCancelled, "the prompt was ended before it was in the cache");
  }
  return cached_;
}

std::unique_ptr<Answer> Engine::ask(Question question) {
  const std::shared_ptr<Service> service = this->service();
  check(question);
  Model& model = *model_;
  const auto asked = std::make_shared<Question>(std::move(question));
  const std::shared_ptr<const CachePlan> plan = plan_of(asked->kv);

  std::vector<PictureShape> shapes;
  for (const SentImage& image : asked->images) shapes.push_back(image.shape(shapes.size() + 1));
  const auto open = std::make_shared<std::vector<OpenClip>>();
  std::vector<Clip> clips;
  for (const SentVideo& video : asked->videos) {
    open->push_back(choose_frames(model, video.open(), asked->frames));
    open->back().rest();
    clips.push_back(open->back().clip);
  }
  if (asked->messages.empty()) {
    const size_t images = shapes.size();
    std::string text = asked->prompt;
    if (text.empty()) text = default_question(model, images, clips.size());
    if (!asked->system.empty()) {
      asked->messages.push_back({"system", {{ContentItem::Kind::kText, asked->system}}});
    }
    asked->messages.push_back(user_message(std::move(text), images, model.image_token(),
                                           clips.size(), model.video_token()));
  }
  complete_question(model, asked->messages);
  const PromptOutline outline =
      outline_prompt(model, asked->messages, visual_texts(model, shapes, clips));
  const int context = model.decoder().max_positions();
  require_context(outline, {}, model, context,
                  cure_of_long_prompt(clips, "use fewer images or a shorter prompt"));
  const int rows = static_cast<int>(outline.rows);
  const int most =
      std::min(asked->max_tokens.value_or(model.defaults().max_tokens), context - rows);

  ServiceJob job{{}, plan, {rows, static_cast<int>(outline.visual_rows), rows + most}, {}, {}};
  job.prepare = [&model, asked, open, context, most](const Watch& watch) {
    GenerationRequest made;
    made.id = "the request";
    made.messages = asked->messages;
    for (const SentImage& image : asked->images) {
      give_up_if_cancelled(&watch);
      made.images.push_back(image.decode(made.images.size() + 1));
    }
    for (const OpenClip& clip : *open) {
      give_up_if_cancelled(&watch);
      made.videos.push_back(clip.decode());
    }
    made.sampling = model.defaults().sampling;
    made.sampling.temperature = asked->temperature.value_or(0);
    if (asked->top_k) made.sampling.top_k = *asked->top_k;
    if (asked->top_p) made.sampling.top_p = *asked->top_p;
    if (asked->repetition_penalty) made.sampling.repetition_penalty = *asked->repetition_penalty;
    made.sampling.seed = asked->seed;
    made.max_tokens = most;
    made.stop = asked->stop;
    made.top_logprobs = asked->logprobs;
    made.records_prompt = asked->records;
    asked->images.clear();
    return prepare_request(model, std::move(made), context, &watch);
  };
  std::shared_ptr<CachedPrompt> cached;
  if (asked->records) {
    cached = std::make_shared<CachedPrompt>();
    job.on_prompt = [cached](const Generator& generator, int key) {
      *cached = generator.cached_prompt(key);
    };
  }
  std::shared_ptr<Ticket> ticket;
  try {
    ticket = service->submit(std::move(job));
  } catch (const ServiceRefusal& refusal) {
    if (refusal.reason() == ServiceRefusal::Reason::kDraining) refuse_closed();
    throw;
  }
  return std::make_unique<Answer>(std::move(ticket), plan->spec, std::move(clips),
                                  std::move(cached));
}

std::string Engine::result_json(Answer& answer) const {
  const GenerationResult& result = answer.ticket().result();
  if (result.finish_reason == "cancelled") {
    throw Error(ErrorCode::kCancelled, "the model was closed while it answered");
  }
  nlohmann::ordered_json json =
      kvlm::result_json(result, *session_, *model_, answer.spec(), answer.clips(), {});
  for (size_t i = 0; i < result.logprobs.size(); ++i) {
    nlohmann::ordered_json top = nlohmann::ordered_json::array();
    for (const auto& [token, logprob] : result.logprobs[i].top) top.push_back({token, logprob});
    json["logprobs"].push_back(
        {{"token", result.tokens[i]}, {"logprob", result.logprobs[i].logprob}, {"top", top}});
  }
  return json_line(json);
}

std::string Engine::token_bytes(int32_t token) const { return model_->tokenizer().bytes_of(token); }

}  // namespace kvlm::python
