#include "tools/run/dry_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "kernels/base/error.h"
#include "kernels/base/human_bytes.h"
#include "kernels/base/printable.h"
#include "kernels/base/queue.h"
#include "kvcache/make_cache.h"
#include "kvcache/plan/planner.h"
#include "runtime/policy_profile.h"
#include "runtime/prompt.h"
#include "runtime/spec_file.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/room.h"
#include "tools/run/batch_room.h"
#include "tools/run/records.h"
#include "tools/run/report.h"
#include "tools/run/requests.h"

// `vlm-run --dry-run`: opens a model without weights, counts the tokens of the prompts, and divides
// the memory that is left among sequences by the closed formulas of the cache.
namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

/// What others are compared with, when the command names one policy.
constexpr const char* kOthers[] = {
    "f16", "int8", "int4", "kivi", "calibquant,bits=2 + int4,scope=text", "prefixkv,keep=0.5"};
constexpr size_t kPrinted = 20;  // faults of records

/// Prompts that are to be answered, longest first among `size`.
struct Prompts {
  size_t count = 0;
  size_t failed = 0;
  int64_t tokens = 0;  ///< of all
  int64_t visual = 0;
  SequenceSize longest;

  void add(const PromptOutline& outline, const Requests& requests) {
    ++count;
    tokens += outline.rows;
    visual += outline.visual_rows;
    if (outline.rows < longest.prompt_rows) return;
    longest.prompt_rows = static_cast<int>(outline.rows);
    longest.visual_rows = static_cast<int>(outline.visual_rows);
    longest.max_rows = requests.rows(outline);
  }
};

/// The memory that is planned with.
struct Memory {
  std::string name;
  bool gpu = false;
  size_t bytes = 0;
};

Memory memory_of(const RunOptions& options) {
  if (options.session.memory) return {"--memory", true, *options.session.memory};
  const Device device = parse_device(options.session.device);
  if (device.kind == DeviceKind::kCpu) return {"free memory", false, available_memory()};
  const cuda::DeviceFacts facts = cuda::device_facts(device.index);
  return {fmt::format("free on {} ({})", device_name(device), facts.name), true, facts.free_bytes};
}

/// A policy, what one sequence takes in it, and how many fit.
struct Fit {
  std::string spec;
  Reservation each;
  size_t sequences = 0;
};

Fit fit(const CachePlan& plan, const std::string& spec, const SequenceSize& size, size_t left) {
  Fit made{spec, {}};
  if (size.max_rows == 0) return made;  // no record can be answered
  made.each = reservation(plan, size);
  if (left > made.each.staging) made.sequences = (left - made.each.staging) / made.each.kept;
  return made;
}

/// Of --kv, and of those of kOthers that serve such a model.
std::vector<Fit> fits_of(const Session& session, const std::string& kv, const SequenceSize& size,
                         size_t left) {
  std::vector<Fit> fits{fit(*session.plan(), canonical(read_spec(kv)), size, left)};
  for (const char* text : kOthers) {
    const CacheSpec spec = read_spec(text);
    if (canonical(spec) == fits.front().spec) continue;
    try {
      fits.push_back(fit(*plan_cache(spec, session.plan()->shape), canonical(spec), size, left));
    } catch (const Error&) {  // this model's shape is not for it
    }
  }
  return fits;
}

Prompts prompts_of_records(const RunOptions& options, Requests& requests) {
  Prompts prompts;
  std::string left_out;
  const std::vector<Record> records = read_records(options.batch_in, options.batch_out, &left_out);
  if (!left_out.empty()) print_message("vlm-run: note: {}\n", left_out);
  for (const Record& record : records) {
    if (interrupted()) throw Error(ErrorCode::kCancelled, "interrupted");
    try {
      const OpenRecord open = requests.open(record);
      prompts.add(open.outline, requests);
    } catch (const Error& error) {
      if (++prompts.failed > kPrinted) continue;
      const std::string who = Requests::name_of(record);
      const std::string message = error.what();
      print_message("vlm-run: {}{}\n", message.starts_with(who) ? "" : who + ": ", message);
    }
  }
  return prompts;
}

}  // namespace

int dry_run(const RunOptions& options, const std::vector<OpenPicture>& pictures,
            VideoFiles videos) {
  SessionOptions dry = options.session;
  dry.dry = true;
  Session session(dry);
  Requests requests(options, session.model());
  Prompts prompts;
  if (options.batch_in.empty()) {
    const std::vector<OpenClip> clips =
        choose_frames(session.model(), std::move(videos), options.sampling);
    prompts.add(requests.outline(shapes_of(pictures), clips_of(clips)), requests);
  } else {
    prompts = prompts_of_records(options, requests);
  }
  const Memory memory = memory_of(options);
  const size_t weights = session.weight_bytes();
  const size_t activations = activation_bytes(session.model(), prompts.longest.prompt_rows,
                                              memory.gpu ? DeviceKind::kCuda : DeviceKind::kCpu);
  const size_t taken = weights + activations;
  const size_t left = options.kv_memory.value_or(memory.bytes > taken ? memory.bytes - taken : 0);
  const std::vector<Fit> fits = fits_of(session, options.session.kv, prompts.longest, left);
  const bool served = prompts.count > 0 && fits.front().sequences > 0;
  const int status = served && prompts.failed == 0 ? 0 : kExitFailed;

  if (options.json) {
    Json json{{"model", session.model().name()},
              {"weights_bytes", weights},
              {"activation_bytes", activations},
              {"memory_bytes", memory.bytes},
              {"cache_bytes", left},
              {"records", prompts.count},
              {"failed", prompts.failed},
              {"prompt_tokens", prompts.tokens},
              {"visual_tokens", prompts.visual},
              {"longest_prompt_tokens", prompts.longest.prompt_rows},
              {"max_tokens", requests.max_tokens()},
              {"policies", Json::array()}};
    for (const Fit& one : fits) {
      json["policies"].push_back({{"spec", one.spec},
                                  {"sequence_bytes", one.each.kept},
                                  {"staging_bytes", one.each.staging},
                                  {"sequences", one.sequences}});
    }
    json["version"] = version_line();
    fmt::print("{}\n", json_line(json));
    return status;
  }
  fmt::print("{}: nothing was loaded and nothing is answered\n", printable(session.model().name()));
  fmt::print("{:<12} {:>10}\n", "weights", human_bytes(weights));
  fmt::print("{:<12} {:>10}  estimated, for the longest prompt\n", "activations",
             human_bytes(activations));
  if (options.kv_memory) {
    fmt::print("{:<12} {:>10}  --kv-memory\n", "cache", human_bytes(left));
  } else {
    fmt::print("{:<12} {:>10}  {}; {} of it for the cache\n", "memory", human_bytes(memory.bytes),
               memory.name, human_bytes(left));
  }
  if (options.batch_in.empty()) {
    fmt::print("{:<12} {:>10}  tokens, {} of them visual; the answer has at most {}\n", "prompt",
               prompts.tokens, prompts.visual, requests.max_tokens());
  } else {
    fmt::print(
        "{:<12} {:>10}  and {} that cannot be answered; {} tokens, {} of them visual, the "
        "longest prompt {}; an answer has at most {}\n",
        "records", prompts.count, prompts.failed, prompts.tokens, prompts.visual,
        prompts.longest.prompt_rows, requests.max_tokens());
  }
  fmt::print("\n{:<40} {:>14} {:>8}\n", "--kv", "a sequence", "at once");
  for (const Fit& one : fits) {
    fmt::print("{:<40} {:>14} {:>8}\n", one.spec, human_bytes(one.each.kept), one.sequences);
  }
  return status;
}

}  // namespace kvlm
