// Chat templates as hostile files: whatever is loaded renders to UTF-8 or throws Error, soon.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kernels/base/error.h"
#include "llm/unicode.h"
#include "runtime/chat_template.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using Kind = kvlm::ContentItem::Kind;
  const std::string_view source(reinterpret_cast<const char*>(data), size);
  try {
    const kvlm::ChatTemplate chat(source, "chat_template.jinja");
    for (const bool prompt : {false, true}) {
      const std::string text =
          chat.render({{"system", {{Kind::kText, "Be brief."}}},
                       {"user", {{Kind::kImage, ""}, {Kind::kText, " \xC3\x9C ber 12? "}}},
                       {"assistant", {{Kind::kText, ""}}}},
                      {.bos_token = "<s>", .eos_token = "", .add_generation_prompt = prompt});
      require(kvlm::is_valid_utf8(text));
    }
  } catch (const kvlm::Error& error) {
    const std::string_view text = error.what();
    require(kvlm::is_valid_utf8(text) && text.size() < 2000);
    for (const char c : text) require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
  }
  return 0;
}
