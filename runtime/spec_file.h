#pragma once

#include <string>
#include <string_view>

#include "kvcache/spec/spec.h"

namespace kvlm {

/// A cache spec that differs by layer, as JSON:
///
///   {"default": "prefixkv,keep=0.5 + kivi,bits=2", "layers": {"0-1,30": "kivi,bits=4", "31":
///   "f16"}}
///
/// "default" is any spec; "layers", which may be absent, names the quantizers of some layers. It
/// equals the sentence prefixkv,keep=0.5 + kivi,bits=2 + kivi,bits=4,layers=0-1/30 + f16,layers=31.
/// Throws Error{kCorruptFile} that starts with `name`.
CacheSpec spec_of_json(std::string_view text, const std::string& name);

/// What --kv takes: a spec, or @FILE for a file with a spec or a spec file. Throws as parse_spec()
/// and spec_of_json().
CacheSpec read_spec(const std::string& text);

}  // namespace kvlm
