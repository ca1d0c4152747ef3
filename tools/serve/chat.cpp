#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <utility>

#include "kernels/base/error.h"
#include "runtime/clip_file.h"
#include "runtime/prompt.h"
#include "tools/common/version.h"
#include "tools/common/visual_options.h"
#include "tools/serve/api_error.h"
#include "tools/serve/exchange.h"
#include "vision/image.h"

// A chat request: understood, its size known from the headers of its images, queued with a Service,
// and answered as a whole or in events. The connection's thread waits only for its client and its
// ticket.
namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr const char* kJson = "application/json";
/// Of an image, and of all images of a request, as they are decoded.
constexpr int64_t kMostImagePixels = int64_t{1} << 26;
constexpr int64_t kMostPixels = int64_t{1} << 27;
/// How often a waiting thread looks whether its client is still there.
constexpr auto kLook = 100ms;
/// How long an answer that is not there may keep its status back.
constexpr auto kSilence = 10s;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// A message that calls a file by the name that it had in the request.
std::string with_name(std::string message, const std::string& path, const std::string& name) {
  const size_t place = message.find(path);
  if (place == std::string::npos) return message;
  const std::string before = message.substr(0, place);
  return (before.ends_with("video ") ? before.substr(0, place - 6) : before) + name +
         message.substr(place + path.size());
}

/// The same tokens that vlm-run gives without options.
SamplerOptions sampling_of(const ChatRequest& request, const Model& model, uint64_t seed) {
  SamplerOptions sampling = model.defaults().sampling;
  sampling.temperature = request.temperature.value_or(0);
  if (request.top_k) sampling.top_k = *request.top_k;
  if (request.top_p) sampling.top_p = *request.top_p;
  if (request.repetition_penalty) sampling.repetition_penalty = *request.repetition_penalty;
  sampling.seed = seed;
  return sampling;
}

}  // namespace

/// A request and what it needs, found by the headers of its images alone.
std::shared_ptr<Server::Asked> Server::understand(const nlohmann::json& body) {
  const auto asked = std::make_shared<Asked>();
  asked->request = parse_chat_request(body, limits_, media_);
  ChatRequest& request = asked->request;
  asked->plan = plan_of(spec_of(request.model, request.kv));
  Model& model = engines_->model();
  complete_question(model, request.messages);
  std::vector<PictureShape> shapes;
  int64_t pixels = 0;
  for (const SentMedia& image : request.images) {
    const std::string number = std::to_string(shapes.size() + 1);  // "image 1" in messages
    const ImageInfo info = probe_image(image.bytes, number);
    const int64_t image_pixels = int64_t{info.height} * info.width;
    pixels += image_pixels;
    if (image_pixels > kMostImagePixels || pixels > kMostPixels) {
      throw ApiError(
          413, "image_too_large",
          fmt::format("{} has {} x {} pixels; at most {} in an image and {} in a "
                      "request are read, scale it down",
                      image.name, info.width, info.height, kMostImagePixels, kMostPixels),
          "messages");
    }
    shapes.push_back({info.height, info.width, number});
  }
  SamplingRequest frames = options_.frames;
  if (request.frames.fps || request.frames.frames) frames = request.frames;
  std::vector<Clip> clips;
  for (const SentMedia& video : request.videos) {
    asked->files.push_back(std::make_unique<MemoryFile>(video.bytes));
    const std::string path = asked->files.back()->path();
    try {
      asked->clips.push_back(choose_frames(model, open_video(path), frames));
    } catch (const Error& error) {
      throw Error(error.code(), with_name(error.what(), path, video.name));
    }
    asked->clips.back().rest();
    clips.push_back(asked->clips.back().clip);
  }
  const PromptOutline outline =
      outline_prompt(model, request.messages, visual_texts(model, shapes, clips));
  asked->context = model.decoder().max_positions();
  try {
    require_context(outline, "the request", model,
                    std::min(asked->context, options_.max_prompt + 1),
                    cure_of_long_prompt(clips, "send fewer images or a shorter prompt"));
  } catch (const Error& error) {
    throw ApiError(400, "context_length_exceeded", error.what(), "messages");
  }
  const int wanted = request.max_tokens.value_or(model.defaults().max_tokens);
  const int room = asked->context - static_cast<int>(outline.rows);
  const int most = std::min({wanted, options_.max_answer, room});
  asked->size = {static_cast<int>(outline.rows), static_cast<int>(outline.visual_rows),
                 static_cast<int>(outline.rows) + most};
  return asked;
}

std::shared_ptr<Server::Asked> Server::ask(const std::string& body, const std::string& client) {
  Engines& engines = this->engines();
  if (draining_) throw ApiError(503, "draining", "the server is about to end; ask another one");
  const std::shared_ptr<Asked> asked = understand(parse_body(body));
  const ChatRequest& request = asked->request;
  const std::shared_ptr<const CachePlan> plan = asked->plan;
  Model& model = engines_->model();
  asked->client = client;
  asked->logprobs.emplace(model, request.top_logprobs.has_value());
  asked->facts.id = reply_id();
  asked->facts.created = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  asked->facts.model = request.model.empty() ? options_.name : request.model;
  asked->facts.fingerprint =
      fmt::format("kvlm-{}-{}-{}", kVersion, kCommit, engines_->on_gpu() ? "cuda" : "cpu");
  asked->facts.kv = plan->spec;
  asked->facts.max_tokens = asked->size.max_rows - asked->size.prompt_rows;
  asked->facts.ignored = request.ignored;
  asked->facts.seed = request.seed;
  if (!request.seed && request.temperature.value_or(0) > 0) {
    asked->facts.seed = std::random_device{}();
  }
  for (const std::string& key : request.ignored) metrics_.ignored(key);

  ServiceJob job{client, plan, asked->size, {}};
  // Weak, so that the images of a disconnected client are freed at once.
  job.prepare = [this, weak = std::weak_ptr(asked)](const Watch& watch) {
    const auto own = weak.lock();
    if (!own) throw Error(ErrorCode::kCancelled, "the client has gone");
    GenerationRequest made;
    made.id = "the request";
    made.messages = own->request.messages;
    for (SentMedia& image : own->request.images) {
      give_up_if_cancelled(&watch);
      made.images.push_back(decode_image(image.bytes, std::to_string(made.images.size() + 1)));
      image.bytes = {};
    }
    for (const OpenClip& clip : own->clips) {
      give_up_if_cancelled(&watch);
      made.videos.push_back(clip.decode());
    }
    Model& of = engines_->model();
    made.sampling = sampling_of(own->request, of, own->facts.seed.value_or(0));
    made.max_tokens = own->facts.max_tokens;
    made.stop = own->request.stop;
    made.top_logprobs = own->request.top_logprobs;
    return prepare_request(of, std::move(made), own->context, &watch);
  };
  try {
    asked->ticket = engines.submit(std::move(job));
  } catch (const ServiceRefusal&) {
    throw;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    throw ApiError(400, "kv_too_large", error.what());
  }
  return asked;
}

void Server::chat(Exchange& exchange) {
  const auto asked = ask(exchange.request.body, client_of(exchange.request));
  exchange.model = asked->facts.model;
  exchange.logged = true;
  if (asked->request.stream) return reply_stream(exchange, asked);
  reply_whole(exchange, asked);
}

/// Counts and logs a request that was admitted to the queue.
void Server::finish(const Asked& asked, int status) {
  metrics_.request(status, asked.facts.model, milliseconds_since(asked.start) / 1000);
  Json line{{"id", asked.facts.id},
            {"client", asked.client},
            {"status", status},
            {"model", asked.facts.model},
            {"kv", asked.facts.kv}};
  try {
    const GenerationResult& result = asked.ticket->result();
    if (status == 200) {
      metrics_.answer(result, asked.ticket->queue_ms());
      const bool cut = result.finish_reason == "length" &&
                       asked.facts.max_tokens < asked.request.max_tokens.value_or(0);
      if (cut) metrics_.clamped();
    }
    line["finish"] = result.finish_reason;
    line["prompt_tokens"] = result.prompt_tokens;
    line["visual_tokens"] = result.visual_tokens;
    line["answer_tokens"] = result.tokens.size();
    line["queue_ms"] = asked.ticket->queue_ms();
    line["ttft_ms"] = asked.ticket->queue_ms() + result.timings.ttft_ms;
    line["cache_bytes"] = result.cache.bytes;
  } catch (const std::exception& error) {
    line["error"] = error.what();
  }
  line["total_ms"] = milliseconds_since(asked.start);
  log(line);
}

void Server::reply_whole(Exchange& exchange, const std::shared_ptr<Asked>& asked) {
  Ticket& ticket = *asked->ticket;
  while (!asked->take(ticket.wait(kLook))) {
    if (HttpServer::stream().has_gone()) {
      ticket.cancel();
      metrics_.cancelled();
      while (!ticket.wait(1s).done) {
      }
      exchange.response.status = 499;
      return finish(*asked, 499);
    }
  }
  try {
    const GenerationResult& result = ticket.result();
    if (result.finish_reason == "cancelled") {
      throw ApiError(503, "draining", "the server has ended before the answer; ask another one");
    }
    exchange.response.set_content(
        line_of(reply_json(asked->facts, result, asked->logprobs->take(asked->whole),
                           ticket.queue_ms())),
        kJson);
    finish(*asked, 200);
  } catch (...) {
    const ApiError error = api_error_of(std::current_exception());
    finish(*asked, error.status());
    throw;
  }
}

void Server::reply_stream(Exchange& exchange, const std::shared_ptr<Asked>& asked) {
  // The status stands once the first token does, or after some silence.
  const Clock::time_point end = Clock::now() + kSilence;
  while (Clock::now() < end) {
    const bool done = asked->take(asked->ticket->wait(kLook));
    if (done) {
      const GenerationResult& result = asked->ticket->result();
      if (result.finish_reason == "cancelled") {
        throw ApiError(503, "draining", "the server has ended before the answer; ask another one");
      }
    }
    if (done || !asked->text.empty() || HttpServer::stream().has_gone()) break;
  }
  exchange.response.set_header("Cache-Control", "no-store");
  exchange.response.set_chunked_content_provider(
      "text/event-stream",
      [this, asked](size_t, httplib::DataSink& sink) { return stream_on(asked, sink); });
}

/// Writes events until the answer has ended or its client has gone.
bool Server::stream_on(const std::shared_ptr<Asked>& asked, httplib::DataSink& sink) {
  const bool usage = asked->request.include_usage;
  const auto write = [&](const std::string& event) {
    return sink.write(event.data(), event.size());
  };
  const auto gone = [&] {
    asked->ticket->cancel();
    metrics_.cancelled();
    while (!asked->ticket->wait(1s).done) {
    }
    finish(*asked, 499);
    return false;
  };
  const auto next_text = [&] {
    Json logprobs = asked->logprobs->take(asked->whole);
    return text_event(asked->facts, usage, std::exchange(asked->text, {}), std::move(logprobs));
  };
  if (!write(first_event(asked->facts, usage))) return gone();
  Clock::time_point told = Clock::now();
  while (true) {
    if (!asked->text.empty()) {
      if (!write(next_text())) return gone();
      told = Clock::now();
    }
    if (asked->take(asked->ticket->wait(kLook))) break;
    if (HttpServer::stream().has_gone()) return gone();
    if (Clock::now() - told > kSilence) {
      if (!write(": waiting\n\n")) return gone();
      told = Clock::now();
    }
  }
  if (!asked->text.empty()) write(next_text());
  try {
    const GenerationResult& result = asked->ticket->result();
    if (result.finish_reason == "cancelled") {
      throw ApiError(503, "draining", "the server has ended before the answer; ask another one");
    }
    write(
        last_event(asked->facts, usage, result.finish_reason, asked->logprobs->take(asked->whole)));
    if (usage) write(usage_event(asked->facts, result, asked->ticket->queue_ms()));
    write(kDoneEvent);
    finish(*asked, 200);
    sink.done();
    return true;
  } catch (...) {
    const ApiError error = api_error_of(std::current_exception());
    write(event_of(error.json()));
    finish(*asked, error.status());
    return false;  // the connection ends without the mark of a whole answer
  }
}

}  // namespace kvlm
