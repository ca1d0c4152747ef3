#include "tools/run/requests.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "tools/common/visual_options.h"
#include "tools/run/videos.h"
#include "vision/image.h"

namespace kvlm {

std::string Requests::name_of(const Record& record) {
  if (!record.id.is_null()) return fmt::format("record {}", printable(record.id.dump()));
  return fmt::format("{} {}", record.listed ? "image" : "line", record.line);
}

std::vector<ChatMessage> Requests::conversation(const std::string& prompt, size_t images,
                                                size_t videos) const {
  const std::string& question = prompt.empty() ? options_.prompt : prompt;
  std::vector<ChatMessage> messages = opening(options_);
  messages.push_back(
      user_message(question.empty() ? default_question(model_, images, videos) : question, images,
                   model_.image_token(), videos, model_.video_token()));
  return messages;
}

PromptOutline Requests::outline(const std::string& prompt, const std::vector<PictureShape>& images,
                                const std::vector<Clip>& clips, const std::string& who,
                                const char* cure) const {
  PromptOutline made = outline_prompt(model_, conversation(prompt, images.size(), clips.size()),
                                      visual_texts(model_, images, clips));
  require_context(made, who, model_, context(), cure_of_long_prompt(clips, cure));
  return made;
}

PromptOutline Requests::outline(const std::vector<PictureShape>& images,
                                const std::vector<Clip>& clips) const {
  return outline({}, images, clips, "the request",
                 images.size() > 1
                     ? "give fewer images, or ask about each by itself: --batch FOLDER --out "
                       "OUT.jsonl"
                     : "give a shorter prompt");
}

int Requests::rows(const PromptOutline& outline) const {
  return static_cast<int>(std::min<int64_t>(outline.rows + max_tokens(), context()));
}

OpenRecord Requests::open(const Record& record) const {
  if (!record.error.empty()) throw Error(ErrorCode::kInvalidArgument, record.error);
  OpenRecord opened;
  std::vector<PictureShape> shapes;
  for (const std::string& image : record.images) {
    const ImageInfo info = probe_image(image);
    shapes.push_back({info.height, info.width, image_name(image)});
    opened.pixels += int64_t{info.height} * info.width;
  }
  VideoFiles videos;
  for (const std::string& video : record.videos) videos.push_back(open_video(video));
  opened.clips = choose_frames(model_, std::move(videos), options_.sampling);
  const std::vector<Clip> clips = clips_of(opened.clips);
  for (OpenClip& clip : opened.clips) {
    const VideoInfo& info = clip.clip.info;
    opened.pixels += int64_t{info.height} * info.width * std::ssize(clip.clip.frames);
    clip.rest();
  }
  opened.outline = outline(record.prompt, shapes, clips, name_of(record),
                           "give the record fewer images or a shorter prompt");
  return opened;
}

PreparedRecord Requests::prepare(const Record& record, const OpenRecord& open,
                                 const Watch& watch) const {
  GenerationRequest request = base_request(options_, model_);
  request.id = name_of(record);
  request.messages = conversation(record.prompt, record.images.size(), record.videos.size());
  for (const std::string& image : record.images) {
    give_up_if_cancelled(&watch);
    request.images.push_back(load_image(image));
  }
  for (const OpenClip& clip : open.clips) {
    give_up_if_cancelled(&watch);
    request.videos.push_back(clip.decode());
  }
  std::vector<std::string> warnings = warnings_of(request.images, request.videos);
  PreparedRecord prepared{prepare_request(model_, std::move(request), context(), &watch),
                          clips_of(open.clips)};
  std::ranges::move(warnings, std::back_inserter(prepared.request.warnings));
  return prepared;
}

}  // namespace kvlm
