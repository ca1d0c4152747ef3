#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/registry.h"
#include "runtime/policy_profile.h"
#include "runtime/spec_file.h"
#include "tools/common/model_shape.h"
#include "tools/common/program.h"
#include "tools/kv/commands.h"
#include "tools/kv/equal_bits.h"
#include "tools/kv/estimate.h"
#include "tools/kv/estimate_json.h"
#include "tools/run/pictures.h"
#include "tools/run/requests.h"

// `vlm-kv explain`: what a spec stores, layer by layer, for a model's shape and a prompt, from the
// closed formulas; no weights are read.
namespace kvlm {

namespace {

struct ExplainOptions {
  std::string spec;
  std::string profile;
  std::string model = "pocket";
  PromptSize prompt;
  std::vector<std::string> images;
  std::string question;  ///< about the images
  std::optional<double> bits;
  bool json = false;
};

/// 1234567 as "1,234,567".
std::string grouped(size_t number) {
  const std::string digits = fmt::format("{}", number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

bool alike(const Estimate& made, size_t a, size_t b) {
  if (made.counts[a].rows != made.counts[b].rows) return false;
  return std::all_of(kPartColumns.begin(), kPartColumns.end(), [&](const PartColumn& column) {
    return made.layers[a].*column.bytes == made.layers[b].*column.bytes;
  });
}

/// Says where a rule keeps more than keep= asks for, such as a window longer than the budget.
void print_floor(const CacheSpec& spec, int tokens, double kept) {
  for (const SpecPart& part : spec.parts) {
    const std::string* keep = find_retention(part.name) != nullptr ? part.find("keep") : nullptr;
    if (keep == nullptr) continue;
    const double asked = std::stod(*keep) * tokens;
    if (kept <= 1.1 * asked + 2) continue;  // rounded to whole tokens
    fmt::print(
        "keep={} asks for {:.1f} tokens per layer; the rest is always kept (vlm-kv list {})\n",
        *keep, asked, part.name);
  }
}

void print_table(const ExplainOptions& options, const CacheSpec& spec, const CacheShape& shape,
                 const Estimate& made) {
  const size_t total = made.parts.total();
  fmt::print("{} on {} after a prompt of {} tokens, {} of them visual\n", canonical(spec),
             printable(options.model), options.prompt.tokens, options.prompt.visual);
  fmt::print("{} layers, {} kv_heads, head_dim {}: {} bytes, {:.1f} % of f16's {}\n", shape.layers,
             shape.kv_heads, shape.head_dim, grouped(total),
             100 * static_cast<double>(total) / static_cast<double>(made.f16_bytes),
             grouped(made.f16_bytes));
  fmt::print(
      "{:.3f} stored bits per element of the prompt ({:.3f} nominal), {:.1f} tokens per layer\n",
      made.stored_bits, made.nominal_bits, made.slots);
  print_floor(spec, options.prompt.tokens, made.slots);
  if (made.even_attention) {
    fmt::print(
        "token counts assume that all tokens get equal attention; with a real prompt they depend "
        "on its attention\n");
  }

  if (made.extrapolated) {
    fmt::print("token counts are extrapolated from prompts of up to {} tokens\n", kExactTokens / 2);
  }

  std::vector<const PartColumn*> columns;  // of what there is
  for (const PartColumn& column : kPartColumns) {
    if (made.parts.*column.bytes > 0) columns.push_back(&column);
  }
  fmt::print("\n{:<12} {:>16} {:>7}\n", "part", "bytes", "%");
  for (const PartColumn* column : columns) {
    const size_t bytes = made.parts.*column->bytes;
    fmt::print("{:<12} {:>16} {:>7.1f}\n", column->name, grouped(bytes),
               100 * static_cast<double>(bytes) / static_cast<double>(total));
  }

  fmt::print("\n{:<12} {:>7} {:>14}", "each layer", "tokens", "bytes");
  for (const PartColumn* column : columns) fmt::print(" {:>13}", column->name);
  fmt::print("\n");
  for (size_t first = 0; first < made.layers.size();) {
    size_t last = first;
    while (last + 1 < made.layers.size() && alike(made, first, last + 1)) ++last;
    fmt::print("{:<12} {:>7} {:>14}",
               first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last),
               made.counts[first].rows, grouped(made.layers[first].total()));
    for (const PartColumn* column : columns) {
      fmt::print(" {:>13}", grouped(made.layers[first].*column->bytes));
    }
    fmt::print("\n");
    first = last + 1;
  }
}

/// Tokens of the prompt that asks about options.images, of whose files the headers are read.
PromptSize prompt_size(const ExplainOptions& options) {
  RunOptions run;
  run.session.model = options.model;
  run.session.dry = true;
  if (!options.question.empty()) run.prompt = read_prompt(options.question);
  std::vector<OpenPicture> images;
  for (const std::string& name : options.images) {
    require_picture(name);
    images.push_back(open_picture(name, /*decode=*/false));
  }
  Session session(run.session);
  const PromptOutline outline = Requests(run, session.model()).outline(shapes_of(images), {});
  return {static_cast<int>(outline.rows), static_cast<int>(outline.visual_rows)};
}

int run_explain(ExplainOptions options) {
  CacheSpec spec = read_spec(options.spec);
  if (!options.images.empty()) options.prompt = prompt_size(options);
  if (options.prompt.tokens == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "vlm-kv explain needs the length of a prompt; give --tokens N, or --image FILE; "
                "see vlm-kv explain --help");
  }
  if (options.prompt.visual > options.prompt.tokens) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--visual {} is more than --tokens {}; visual tokens are part of the "
                            "prompt",
                            options.prompt.visual, options.prompt.tokens));
  }
  const CacheShape shape = model_shape(options.model);
  PolicyProfile profile;
  if (!options.profile.empty()) {
    profile = read_profile(options.profile);
    require_profile_of(profile, options.model);
  }
  if (options.bits) spec = at_equal_bits(spec, *options.bits, shape, options.prompt, &profile);
  const Estimate made = estimate(spec, shape, options.prompt, &profile);
  if (options.json) {
    // A folder's name need not be UTF-8.
    fmt::print("{}\n", estimate_json(canonical(spec), options.model, shape, options.prompt, made)
                           .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else {
    print_table(options, spec, shape, made);
  }
  return 0;
}

}  // namespace

std::function<int()> add_explain(CLI::App& app) {
  constexpr int kMaxTokens = 1 << 24;
  const auto options = std::make_shared<ExplainOptions>();
  app.add_option("SPEC,--kv", options->spec, "Cache policy, or @FILE.json")->required();
  app.add_option("-m,--model", options->model, "As vlm-run's -m; reads no weights")
      ->capture_default_str();
  CLI::Option* tokens = app.add_option("--tokens", options->prompt.tokens, "Tokens of the prompt")
                            ->check(CLI::Range(1, kMaxTokens));
  CLI::Option* visual = app.add_option("--visual", options->prompt.visual,
                                       "Visual tokens of the prompt, part of --tokens")
                            ->check(CLI::Range(0, kMaxTokens))
                            ->capture_default_str();
  CLI::Option* image =
      app.add_option("--image", options->images,
                     "Count the tokens of the prompt that asks about this image instead; "
                     "repeatable. Reads the file's header")
          ->excludes(tokens)
          ->excludes(visual);
  app.add_option("-p,--prompt", options->question,
                 "Question about --image, as vlm-run's -p; default: for a caption")
      ->needs(image);
  app.add_option("--kv-profile", options->profile,
                 "File that vlm-kv profile measured on this model");
  app.add_option("--bits", options->bits,
                 "Solve keep= of the retention rule, and set evict=, for this many stored bits per "
                 "element of the prompt")
      ->check(CLI::Range(0.01, 32.0));
  app.add_flag("--json", options->json, "Print one JSON object");
  return [options] { return run_explain(*options); };
}

}  // namespace kvlm
