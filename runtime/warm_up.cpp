#include "runtime/warm_up.h"

#include <algorithm>
#include <vector>

#include "runtime/prompt.h"

namespace kvlm {

namespace {

constexpr int kSmallRows = 4;

/// Some text of so many tokens that answers with more of it.
PreparedRequest text_of(const Model& model, int rows, int answer) {
  int32_t id = 0;
  while (model.is_visual(id)) ++id;
  PreparedRequest made;
  made.request.id = "warm-up";
  made.request.ignore_eos = true;
  made.request.max_tokens = answer;
  made.context = rows + answer;
  made.prompt.ids.assign(static_cast<size_t>(rows), id);
  made.prompt.modality.assign(static_cast<size_t>(rows), kTextRow);
  made.prompt.positions = following_positions(0, static_cast<size_t>(rows));
  made.prompt.next_position = rows;
  return made;
}

SequenceSize size_of(int rows, int answer) { return {rows, 0, rows + answer}; }

PreparedRequest image_of(Model& model) {
  constexpr int kSide = 224;
  GenerationRequest request;
  request.id = "warm-up";
  request.images.push_back({kSide, kSide, std::vector<uint8_t>(3 * kSide * kSide, 128)});
  request.messages = {user_message(default_question(model, 1, 0), 1, model.image_token())};
  request.max_tokens = 1;
  return prepare_request(model, std::move(request), model.decoder().max_positions(), nullptr);
}

SequenceSize size_of(const Prompt& prompt) {
  const int rows = static_cast<int>(prompt.ids.size());
  return {rows, static_cast<int>(prompt.visual_rows()), rows + 1};
}

}  // namespace

void warm_up(Model& model, const KvCache& cache, Generator& generator, size_t sequences, int rows) {
  const auto admit = [&](PreparedRequest request) {
    const int key = generator.admit(std::move(request), {});
    generator.deliver();
    return key;
  };
  PreparedRequest image = image_of(model);
  if (cache.fits(size_of(image.prompt))) generator.take(admit(std::move(image)));

  rows = std::min(rows, model.decoder().max_positions() - 1);
  while (rows > kSmallRows && !cache.fits(size_of(rows, 1))) rows -= std::max(1, rows / 16);
  if (cache.fits(size_of(rows, 1))) generator.take(admit(text_of(model, rows, 1)));

  constexpr int kAnswer = 40;  // more than the steps of any
  std::vector<int> keys;
  while (keys.size() < sequences && cache.fits(size_of(kSmallRows, kAnswer))) {
    keys.push_back(admit(text_of(model, kSmallRows, kAnswer)));
    const bool is_power = (keys.size() & (keys.size() - 1)) == 0;
    if (is_power || keys.size() == sequences) generator.step();
  }
  for (const int key : keys) {
    generator.cancel(key);
    generator.take(key);
  }
}

}  // namespace kvlm
