#include <fmt/format.h>

#include <algorithm>

#include "kvcache/spec/registry.h"
#include "kvcache/spec/spec.h"
#include "tools/kv/estimate.h"
#include "tools/kv/list.h"

// Prints docs/policies.md (`vlm-kv list --markdown`) and docs/policy-options.md (`vlm-kv list
// --markdown options`) from the tables of options and the byte formulas, so that page, help and
// parser cannot differ.
namespace kvlm {

namespace {

constexpr std::string_view kIntroduction = R"(# Cache policies

A cache policy decides which tokens the KV cache keeps and how it stores them. You choose it with `--kv SPEC`. This page has the
spec language and an overview; [policy-options.md](policy-options.md) has every option, [formulas.md](formulas.md) the formulas.
`vlm-kv list --markdown` prints this page, and a test compares the two.

`vlm-kv explain SPEC -m MODEL --tokens N --visual M` prints the memory of a policy by component and layer, without weights.

## What a spec is

    SPEC  := PART ('+' PART)*            kivi,bits=2    calibquant,bits=1,tau=0:3    prefixkv,keep=0.5 + vidkv
    PART  := NAME (',' KEY=VALUE)*       visual=calibquant text=kivi    kivi + share=codes,from=0:16

- **Parts.** A spec has at most one retention rule (token eviction), one quantizer for each scope, and one sharing part. However
  you write them, they apply in this order: retention, merging, quantization, sharing.
- **Scope.** A quantizer packs all tokens, or only visual or text tokens (`scope=`). `visual=NAME text=NAME` is short for
  `NAME,scope=visual + NAME,scope=text`. Tokens without a quantizer are stored as 16-bit floats, or as `bf16` or `f32` if named.
- **Layers.** A quantizer with `layers=0-1/30` packs these layers. One of the same scope without `layers` packs the others.
- **Profiles.** `profile=official` takes its defaults from the published code, defects included. `profile=paper` takes them from
  the text of the paper. An option that you write wins over the profile.
- **Calibrated values.** On a model, `vlm-kv profile` measures alpha, tau and eta for each bit width, and the budgets of
  PrefixKV. `--kv-profile FILE` passes them to a run. A policy uses only the values of its own bit width, else its default.
  Values that a paper finds by a search on the model have no default: a spec that needs them is refused without a profile.
- **Baseline.** `random` is the rule that every other retention rule has to beat at equal size.
- **Canonical text.** Programs print a spec in one spelling, which parses to the same spec. Options stay as written; a scope or
  profile that is the policy's default is left out.
- **Errors.** An unknown name, key or value, and parts that do not go together, are refused before weights are read. The message
  has the nearest legal spelling.

A spec file, `--kv @FILE.json`, sets quantizers by layer:

    {"default": "prefixkv,keep=0.5 + kivi,bits=2", "layers": {"0-1,30": "kivi,bits=4", "31": "f16"}}

This equals `prefixkv,keep=0.5 + kivi,bits=2 + kivi,bits=4,layers=0-1/30 + f16,layers=31`.

## Overview

Bits are per element of the keys and values of a prompt, right after prefill, under each policy's default options. *Nominal*
bits are the figure of the papers: codes only, of packed tokens only. *Stored* bits count every byte: codes, scales, zero
points, masks and unquantized tokens. Retention rules keep half of the tokens by default, so 16 bits become 8.

- Prompt A: 624 tokens, 576 of them visual; 32 layers with 32 KV heads of 128 channels (LLaVA-1.5-7B).
- Prompt B: 4200 tokens, 4096 of them visual; 28 layers with 4 KV heads of 128 channels (Qwen2-VL-7B).
)";

constexpr std::string_view kComposition = R"(
## What goes with what

| retention rule keeps | quantizers | sharing (`share=codes`, `xquant`) |
|---|---|---|
| all tokens, or the same tokens in all layers (`streaming`) | all | yes |
| different tokens in each layer | all | the two layers of a pair keep the same tokens |
| different tokens in each KV head | all | refused |
| keys that it rotates again (`streaming,rerotate=on`) | none: packed keys cannot be rotated | refused |

- Merging (`prefixkv,merge=`, `elastic`) happens before quantization, never into packed tokens.
- `vidkv` shares values only (`from=off:0`), since its 2-bit channels differ by layer.
- `calibquant` and `head_quantile` pack images once, at the end of the prompt. The others pack tokens as they age. Within one
  scope, a spec uses quantizers of one of these kinds in all layers.

## Adding a policy

[add-a-policy.md](add-a-policy.md) names every file.
)";

constexpr std::string_view kOptionsIntroduction = R"(# Options of the cache policies

Every option of every policy: `--kv NAME,KEY=VALUE`. [policies.md](policies.md) explains specs and gives an overview.
`vlm-kv list --markdown options` prints this page, and a test compares the two.

The columns *default*, *official* and *paper* are the values under `profile=default`, `profile=official` (the published code)
and `profile=paper` (the text of the paper). An empty cell means: as default.
)";

/// A prompt that bits are given for.
struct Sample {
  CacheShape shape;
  PromptSize size;
};

Sample sample(int layers, int q_heads, int kv_heads, PromptSize size) {
  Sample made;
  made.shape.layers = layers;
  made.shape.q_heads = q_heads;
  made.shape.kv_heads = kv_heads;
  made.shape.head_dim = 128;
  made.shape.rope_frequencies.assign(64, 1.0f);
  made.size = size;
  return made;
}

std::string bits(double value) {
  std::string text = fmt::format("{:.3f}", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text;
}

/// "nominal | stored A | stored B" of a part on its own.
std::string bits_columns(const PolicyInfo& info) {
  if (info.kind == PartKind::kSharing) return "| | ";
  const CacheSpec spec = parse_spec(info.name);
  const Sample a = sample(32, 32, 32, {624, 576});
  const Sample b = sample(28, 28, 4, {4200, 4096});
  const Estimate on_a = estimate(spec, a.shape, a.size);
  const Estimate on_b = estimate(spec, b.shape, b.size);
  return fmt::format("{} | {} | {}", bits(on_a.nominal_bits), bits(on_a.stored_bits),
                     bits(on_b.stored_bits));
}

std::string cell(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string code(std::string_view value) {
  return value.empty() ? std::string() : fmt::format("`{}`", cell(value));
}

/// The source, with a link to its paper.
std::string source(const PolicyInfo& info) {
  if (info.arxiv.empty()) return cell(info.source);
  return fmt::format("{} ([{}](https://arxiv.org/abs/{}))", cell(info.source), info.arxiv,
                     info.arxiv);
}

std::string overview(std::string_view title, std::string_view verb,
                     const std::vector<const PolicyInfo*>& infos) {
  std::string text = fmt::format(
      "\n### {}\n\n| name | {} | example | nominal | stored A | stored B | goes with | source |\n"
      "|---|---|---|---|---|---|---|---|\n",
      title, verb);
  for (const PolicyInfo* info : infos) {
    text +=
        fmt::format("| {} | {} | {} | {} | {} | {} |\n", code(spec_name(*info)), cell(info->stores),
                    code(info->example), bits_columns(*info), cell(info->composes), source(*info));
  }
  return text;
}

std::string option_row(const OptionInfo& option) {
  return fmt::format("| `{}` | {} | {} | {} | {} | {} |\n", option.key, code(option.standard),
                     code(option.official), code(option.paper), cell(legal_values(option)),
                     cell(option.help));
}

constexpr std::string_view kOptionsHead =
    "| option | default | official | paper | legal | meaning |\n|---|---|---|---|---|---|\n";

std::string options(const PolicyInfo& info) {
  std::string rows;
  for (const OptionInfo& option : info.options) {
    if (option.key != "what") rows += option_row(option);
  }
  if (rows.empty()) return {};
  return fmt::format("\n## `{}`\n\n{}{}", spec_name(info), kOptionsHead, rows);
}

/// Of parts of any name: what options_of() adds to the parts' own.
std::string options_of_all() {
  std::string text = fmt::format(
      "\n## Options of every quantizer, and `profile` of every policy\n\n{}", kOptionsHead);
  for (const OptionInfo* option : general_options()) text += option_row(*option);
  return text;
}

std::vector<const PolicyInfo*> policies_of(PartKind kind) {
  std::vector<const PolicyInfo*> infos = policies();
  std::erase_if(infos, [&](const PolicyInfo* info) { return info->kind != kind; });
  return infos;
}

}  // namespace

std::string policies_markdown() {
  std::string text(kIntroduction);
  text += overview("Quantizers and plain formats", "stores", policies_of(PartKind::kQuantizer));
  const std::vector<const PolicyInfo*> rules = policies_of(PartKind::kRetention);
  if (!rules.empty()) text += overview("Retention rules (token eviction)", "keeps", rules);
  text += overview("Sharing", "stores", policies_of(PartKind::kSharing));
  text += kComposition;
  return text;
}

std::string options_markdown() {
  std::string text(kOptionsIntroduction);
  text += options_of_all();
  for (const PartKind kind : {PartKind::kQuantizer, PartKind::kRetention, PartKind::kSharing}) {
    for (const PolicyInfo* info : policies_of(kind)) text += options(*info);
  }
  return text;
}

}  // namespace kvlm
