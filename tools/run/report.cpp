#include "tools/run/report.h"

#include <fmt/format.h>

#include "kernels/base/human_bytes.h"
#include "kernels/base/printable.h"
#include "runtime/prompt.h"
#include "tools/common/memory.h"
#include "tools/common/program.h"
#include "tools/run/videos.h"

namespace kvlm {

namespace {

double per_second(double count, double ms) { return ms > 0 ? 1000 * count / ms : 0; }

double decode_rate(const GenerationResult& result) {
  // The first token belongs to the prefill.
  return per_second(static_cast<double>(result.tokens.size()) - 1, result.timings.decode_ms);
}

}  // namespace

nlohmann::ordered_json result_json(const GenerationResult& result, const Session& session,
                                   const Model& model, const std::string& spec,
                                   std::span<const Clip> clips,
                                   std::span<const std::string> warnings) {
  const Timings& t = result.timings;
  nlohmann::ordered_json json;
  json["text"] = result.text;
  json["tokens"] = result.tokens;
  json["finish_reason"] = result.finish_reason;
  json["model"] = model.name();
  json["device"] = device_name(session.device());
  json["prompt_tokens"] = result.prompt_tokens;
  json["visual_tokens"] = result.visual_tokens;
  for (const Clip& clip : clips) {
    nlohmann::ordered_json sampled{{"frames", clip.frames.size()}, {"of", clip.info.frames}};
    if (clip.info.fps > 0) sampled["fps"] = clip.info.fps;
    json["clips"].push_back(std::move(sampled));
  }
  for (const std::string& warning : warnings) json["warnings"].push_back(warning);
  json["generated_tokens"] = result.tokens.size();
  json["timings"] = {{"load_ms", session.load_ms()},
                     {"vision_ms", t.vision_ms},
                     {"prefill_ms", t.prefill_ms},
                     {"ttft_ms", t.ttft_ms},
                     {"decode_ms", t.decode_ms},
                     {"prefill_tps", per_second(result.prompt_tokens, t.prefill_ms)},
                     {"decode_tps", decode_rate(result)}};
  json["kv"] = {{"spec", spec},
                {"bytes", result.cache.bytes},
                {"f16_bytes", result.cache.f16_bytes},
                {"stored_bits", result.cache.stored_bits},
                {"nominal_bits", result.cache.nominal_bits},
                {"slots", result.cache.slots},
                {"guarded_remaps", result.cache.guarded_remaps}};
  json["memory"] = memory_json(session.device(), model);
  json["version"] = version_line();
  return json;
}

std::vector<std::string> full_context_warning(const GenerationResult& result, Model& model,
                                              int max_tokens) {
  if (result.finish_reason != "length" || std::ssize(result.tokens) >= max_tokens) return {};
  const int context = model.decoder().max_positions();
  return {fmt::format(
      "the answer ends after {} tokens, where the context of {}, {} tokens{}, is "
      "full; use fewer images or a shorter prompt",
      result.tokens.size(), printable(model.name()), context, window_note(model, context))};
}

std::string summary(const GenerationResult& result, const Session& session, const Model& model,
                    const std::string& spec, std::span<const Clip> clips) {
  std::string videos;
  for (const Clip& clip : clips) videos += fmt::format("video    {}\n", describe_clip(clip));
  const Timings& t = result.timings;
  return fmt::format(
      "model    {} ({}, {}), {} weights, loaded in {:.0f} ms, on {} with {} threads\nprompt   {} "
      "tokens, {} of them visual; vision {:.0f} ms, prefill {:.0f} ms ({:.0f} tokens/s), first "
      "token after {:.0f} ms\n{}answer   {} tokens in {:.0f} ms ({:.1f} tokens/s), ended by {}\nkv "
      "cache {}: {} stored ({} as f16), {:.2f} bits per element, {:.0f} tokens per layer\n",
      model.name(), model.family(), model.weight_format(), human_bytes(model.weight_bytes()),
      session.load_ms(), device_name(session.device()), session.threads(), result.prompt_tokens,
      result.visual_tokens, t.vision_ms, t.prefill_ms,
      per_second(result.prompt_tokens, t.prefill_ms), t.ttft_ms, videos, result.tokens.size(),
      t.decode_ms, decode_rate(result), result.finish_reason, spec, human_bytes(result.cache.bytes),
      human_bytes(result.cache.f16_bytes), result.cache.stored_bits, result.cache.slots);
}

std::string json_line(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace kvlm
