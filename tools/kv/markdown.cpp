#include <fmt/format.h>

#include <algorithm>

#include "kvcache/registry.h"
#include "kvcache/spec.h"
#include "tools/kv/estimate.h"
#include "tools/kv/list.h"

// Prints docs/policies.md (`vlm-kv list --markdown`) from the tables of options and the byte
// formulas, so that page, help and parser cannot differ.
namespace kvlm {

namespace {

constexpr std::string_view kIntroduction = R"(# Cache policies

What `--kv` takes. This page is printed by `vlm-kv list --markdown`; a test compares the two. `vlm-kv explain SPEC -m MODEL
--tokens N --visual M` says what a policy takes of a prompt, by part and layer.

## A policy is a sentence

    SPEC  := PART ('+' PART)*            kivi,bits=2    calibquant,bits=1,tau=0:3    prefixkv,keep=0.5 + vidkv
    PART  := NAME (',' KEY=VALUE)*       visual=calibquant text=kivi    kivi + share=codes,from=0:16

- **Parts**: at most one retention rule, one quantizer for each set of slots, one sharing part. Whatever the order of writing,
  they act, and are printed, in the order of the pipeline: retain, merge, quantize, share.
- **Scopes**: a quantizer packs all slots, or visual or text slots only (`scope=`). `visual=NAME text=NAME` is short for
  `NAME,scope=visual + NAME,scope=text`. Slots that nothing packs are plain rows, 16-bit floats unless `bf16` or `f32` says otherwise.
- **Layers**: a quantizer with `layers=0-1/30` serves these layers, one of the same scope without `layers` serves the others.
- **Profiles**: `profile=official` takes the values of the published code, defects included, `profile=paper` those of the text;
  an option that is written wins over the profile. What is found by a search on the model (PrefixKV's budgets, the paper's tau of
  CalibQuant) comes from `--kv-profile FILE`, measured by `vlm-kv profile`, and is refused without.
- **Fitted values**: alpha, tau and eta are stored by width; a policy uses what was fitted at its own width, else its default.
- **Floor**: `random` is what a retention rule has to beat at equal bits; it has the options of `uniform`, and `seed=`.
- **Canonical text**: printing a spec gives one spelling, and parsing that gives the same spec. Options are printed as written,
  numbers as short as they are exact; a scope or profile that is the policy's usual one is not printed.
- **Refusals**: an unknown name, key or value and an impossible combination are refused before any weight is read, with the
  nearest legal spelling.

A spec file, `--kv @FILE.json`, says the same by layer:

    {"default": "prefixkv,keep=0.5 + kivi,bits=2", "layers": {"0-1,30": "kivi,bits=4", "31": "f16"}}

equals `prefixkv,keep=0.5 + kivi,bits=2 + kivi,bits=4,layers=0-1/30 + f16,layers=31`. Only quantizers differ by layer.

## Overview

Bits are per element of all keys and values of the prompt, right after it, with each policy's default options. *Nominal* is the
papers' own figure: codes only, of the slots that the policy packs. *Stored* counts every byte: codes, scales, zero points,
masks and the rows that stay full. Prompt A: 624 tokens, 576 of them visual, on 32 layers with 32 kv_heads of 128 channels
(LLaVA-1.5-7B). Prompt B: 4200 tokens, 4096 visual, on 28 layers with 4 kv_heads (Qwen2-VL-7B).
)";

constexpr std::string_view kComposition = R"(
## What goes with what

| retention | quantizers | sharing (`share=codes`, `xquant`) |
|---|---|---|
| none, or the same slots in all layers (`streaming`) | all | yes |
| other slots in each layer | all | the two layers of a pair keep the same slots |
| other slots in each kv_head | all | refused |
| keys turned again (`rerotate`) | none: packed keys cannot be turned | refused |

Merging happens before quantization, never into packed rows. `vidkv` shares values only (`from=off:0`), since its 2-bit channels
differ by layer. A quantizer that packs pictures once (`calibquant`, `head_quantile`) and one that packs rows as they age cannot
take turns by layer in one scope.

## Adding a policy

[add-a-policy.md](add-a-policy.md) names every file.
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

std::string overview(std::string_view title, const std::vector<const PolicyInfo*>& infos) {
  std::string text = fmt::format(
      "\n### {}\n\n| name | source | stores | nominal | stored A | stored B | goes with |\n"
      "|---|---|---|---|---|---|---|\n",
      title);
  for (const PolicyInfo* info : infos) {
    text += fmt::format("| {} | {} | {} | {} | {} |\n", code(spec_name(*info)), cell(info->source),
                        cell(info->stores), bits_columns(*info), cell(info->composes));
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
  return fmt::format("\n### Options of `{}`\n\n{}{}", spec_name(info), kOptionsHead, rows);
}

/// Of parts of any name: what options_of() adds to the parts' own.
std::string options_of_all() {
  std::string text = fmt::format(
      "\n### Options of every quantizer, and `profile` of every policy\n\n"
      "An empty cell means: as default.\n\n{}",
      kOptionsHead);
  for (const OptionInfo* option : general_options()) text += option_row(*option);
  return text;
}

}  // namespace

std::string policies_markdown() {
  std::vector<const PolicyInfo*> quantizers;
  std::vector<const PolicyInfo*> retentions;
  std::vector<const PolicyInfo*> sharing;
  for (const PolicyInfo* info : policies()) {
    if (info->kind == PartKind::kQuantizer) quantizers.push_back(info);
    if (info->kind == PartKind::kRetention) retentions.push_back(info);
    if (info->kind == PartKind::kSharing) sharing.push_back(info);
  }
  std::string text(kIntroduction);
  text += overview("Quantizers and plain formats", quantizers);
  if (!retentions.empty()) text += overview("Retention", retentions);
  text += overview("Sharing", sharing);
  text += "\n## Options\n";
  text += options_of_all();
  for (const auto& infos : {quantizers, retentions, sharing}) {
    for (const PolicyInfo* info : infos) text += options(*info);
  }
  text += kComposition;
  return text;
}

}  // namespace kvlm
