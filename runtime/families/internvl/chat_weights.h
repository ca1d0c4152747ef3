#pragma once

#include <string>
#include <string_view>

#include "kernels/weight_map.h"
#include "runtime/families/internvl/config.h"

namespace kvlm {

/// canonical_llava_name() for the tensors of an original InternVL. A packed tensor becomes
/// "...attention.qkv" of the tower or "...self_attn.qkv" of an InternLM2 decoder. Throws
/// Error{kUnsupported} for those that only InternVL3.5-Flash has.
std::string canonical_internvl_chat_name(std::string_view name);

/// Divides the packed tensors, which canonical_internvl_chat_name() named, into q, k and v: the
/// tower's are thirds, InternLM2's lie by KV head: its queries, its key, its value.
void unpack_internvl_chat(WeightMap& weights, const InternVlChatConfig& config);

}  // namespace kvlm
