#include "tools/kv/estimate_json.h"

#include <fmt/format.h>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/registry.h"
#include "kvcache/spec/words.h"
#include "tools/common/program.h"
#include "tools/kv/list.h"

namespace kvlm {

namespace {

nlohmann::ordered_json json_of(const PartBytes& bytes) {
  nlohmann::ordered_json json;
  for (const PartColumn& column : kPartColumns) json[column.key] = bytes.*column.bytes;
  return json;
}

std::string_view value_or(std::string_view value, std::string_view fallback) {
  return value.empty() ? fallback : value;
}

}  // namespace

nlohmann::ordered_json estimate_json(const std::string& spec, const std::string& model,
                                     const CacheShape& shape, const PromptSize& prompt,
                                     const Estimate& made) {
  nlohmann::ordered_json json{{"spec", spec},
                              {"model", model},
                              {"tokens", prompt.tokens},
                              {"visual", prompt.visual},
                              {"kv_heads", shape.kv_heads},
                              {"head_dim", shape.head_dim},
                              {"bytes", made.parts.total()},
                              {"f16_bytes", made.f16_bytes},
                              {"stored_bits", made.stored_bits},
                              {"nominal_bits", made.nominal_bits},
                              {"slots", made.slots},
                              {"even_attention", made.even_attention},
                              {"parts", json_of(made.parts)}};
  if (made.extrapolated) json["extrapolated"] = true;
  json["layers"] = nlohmann::ordered_json::array();
  for (size_t layer = 0; layer < made.layers.size(); ++layer) {
    json["layers"].push_back({{"layer", layer},
                              {"slots", made.counts[layer].rows},
                              {"bytes", made.layers[layer].total()},
                              {"parts", json_of(made.layers[layer])}});
  }
  json["version"] = version_line();
  return json;
}

nlohmann::ordered_json policies_json(const std::string& name) {
  nlohmann::ordered_json policies = nlohmann::ordered_json::array();
  for (const PolicyInfo* info : listed(name)) {
    nlohmann::ordered_json policy{{"name", info->name},
                                  {"kind", kind_name(info->kind)},
                                  {"plain", find_format(info->name).has_value()},
                                  {"source", info->source},
                                  {"stores", info->stores},
                                  {"composes", info->composes},
                                  {"options", nlohmann::ordered_json::array()}};
    for (const OptionInfo* option : options_of(*info)) {
      policy["options"].push_back({{"key", option->key},
                                   {"legal", legal_values(*option)},
                                   {"default", option->standard},
                                   {"official", value_or(option->official, option->standard)},
                                   {"paper", value_or(option->paper, option->standard)},
                                   {"help", option->help}});
    }
    policies.push_back(std::move(policy));
  }
  return policies;
}

std::string_view kind_name(PartKind kind) {
  constexpr std::string_view kKinds[] = {"quantizer", "retention", "sharing",
                                         "simulated quantizer"};
  return kKinds[static_cast<size_t>(kind)];
}

std::vector<const PolicyInfo*> listed(const std::string& name) {
  if (name.empty()) return policies();
  const PolicyInfo* info = find_policy(name.substr(0, name.find('=')));
  if (info != nullptr) return {info};
  const std::string_view near = nearest_spelling(name, part_names());
  throw Error(ErrorCode::kInvalidArgument,
              near.empty()
                  ? fmt::format("\"{}\" is not a policy; see vlm-kv list", printable(name))
                  : fmt::format("\"{}\" is not a policy; did you mean {}?", printable(name), near));
}

}  // namespace kvlm
