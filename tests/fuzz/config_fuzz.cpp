// parse_json and ConfigReader on hostile text: every reader returns a value in its range or throws
// Error, and what was parsed survives being written and parsed again.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "kernels/base/error.h"
#include "runtime/loading/config.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

/// Runs `read`; an Error is fine as long as a person can read it.
template <class Read>
void attempt(const Read& read) {
  try {
    read();
  } catch (const kvlm::Error& error) {
    require(error.code() == kvlm::ErrorCode::kCorruptFile);
    require(std::strlen(error.what()) < 20'000);  // a path of 64 keys, each of bounded length
    const std::string text = error.what();
    for (const char c : text) require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
    static_cast<void>(nlohmann::json(text).dump());  // throws if it is not UTF-8
  }
}

void read_all(const kvlm::ConfigReader& config, const nlohmann::json& object) {
  for (auto member = object.begin(); member != object.end(); ++member) {
    const std::string& name = member.key();
    const nlohmann::json& value = member.value();
    require(config.has(name) == !value.is_null());
    attempt([&] {
      const int64_t number = config.integer(name, 1, -5, 1 << 20);
      require(number >= -5 && number <= 1 << 20);
    });
    attempt([&] { config.required_integer(name, INT64_MIN, INT64_MAX); });
    attempt([&] {
      const double number = config.number(name, 0, -1, 1e30);
      require(number >= -1 && number <= 1e30);
    });
    attempt([&] { config.boolean(name, false); });
    attempt([&] { config.string(name, "x"); });
    attempt([&] { config.required_string(name); });
    attempt([&] { config.fail(name, "something else"); });
    attempt([&] {
      const kvlm::ConfigReader nested = config.object(name);
      if (value.is_object()) read_all(nested, value);
    });
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  attempt([&] {
    const nlohmann::json value = kvlm::parse_json(text, "config.json");
    require(kvlm::parse_json(value.dump(), "again.json") == value);
    const kvlm::ConfigReader config(value, "config.json");
    read_all(config, value);
  });
  return 0;
}
