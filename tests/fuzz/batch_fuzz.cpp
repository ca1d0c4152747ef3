// What a batch reads, as hostile text: records, of which each is a request or has one readable
// error, and an output file that a start may go on in, whose lines are what it says and which a
// further record can follow.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>

#include "kernels/base/error.h"
#include "tools/run/output.h"
#include "tools/run/records.h"

namespace {

using kvlm::BatchSettings;
using kvlm::OutputLine;
using kvlm::OutputText;
using kvlm::Record;

void require(bool condition) {
  if (!condition) std::abort();
}

void require_sentence(std::string_view message) {
  require(!message.empty() && message.size() < 2'000);
  for (const char c : message) require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
}

void read_records(std::string_view text) {
  size_t line = 0;
  std::set<nlohmann::ordered_json> ids;
  for (const Record& record : kvlm::parse_records(text, "folder")) {
    require(record.line > line);
    line = record.line;
    require(record.id.is_null() || record.id.is_string() || record.id.is_number_integer());
    if (!record.id.is_null()) require(ids.insert(record.id).second);
    if (!record.error.empty()) {
      require_sentence(record.error);
      continue;
    }
    require(!record.id.is_null());
    require(!record.images.empty() || !record.videos.empty() || !record.prompt.empty());
    require(!kvlm::difference_of_asked(kvlm::asked_of(record), kvlm::asked_of(record)));
    for (const auto* files : {&record.images, &record.videos}) {
      for (const std::string& file : *files) {
        require(!file.empty() && file.find('\0') == std::string::npos);
      }
    }
  }
}

void require_same(const OutputLine& a, const OutputLine& b) {
  require(a.offset == b.offset && a.id == b.id && a.failed == b.failed && a.asked == b.asked);
  require(!kvlm::difference(a.settings, b.settings) || a.settings.flags.is_null());
}

void read_output(std::string_view text) {
  const OutputText output = kvlm::parse_output(text, "out.jsonl");
  size_t end = 0;
  for (const OutputLine& line : output.lines) {
    require(line.offset == end && line.length > 0);
    end += line.length;
    const BatchSettings other{"m", "f16", {{"seed", 7}}};
    if (const auto differs = kvlm::difference(line.settings, other)) require_sentence(*differs);
    const nlohmann::ordered_json asked{{"images", {"/a"}}, {"prompt", "b"}};
    if (const auto differs = kvlm::difference_of_asked(line.asked, asked)) {
      require_sentence(*differs);
    }
  }
  require(end == output.good_bytes && end <= text.size());

  // As Output leaves it, and with one more record.
  std::string kept(text.substr(0, end));
  if (output.open_end) kept += '\n';
  const OutputText again = kvlm::parse_output(kept + "{\"id\":null,\"text\":\"\"}\n", "out.jsonl");
  require(again.lines.size() == output.lines.size() + 1 && !again.open_end);
  for (size_t i = 0; i < output.lines.size(); ++i) require_same(output.lines[i], again.lines[i]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read_records(text);
  try {
    read_output(text);
  } catch (const kvlm::Error& error) {
    require(error.code() == kvlm::ErrorCode::kCorruptFile);
    require_sentence(error.what());
  }
  return 0;
}
