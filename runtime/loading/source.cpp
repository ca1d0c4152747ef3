#include "runtime/loading/source.h"

#include "runtime/loading/config.h"

namespace kvlm {

nlohmann::json read_json(const ModelSource& source, const std::string& file) {
  const auto text = source.file(file);
  return text ? parse_json(*text, file) : nlohmann::json::object();
}

}  // namespace kvlm
