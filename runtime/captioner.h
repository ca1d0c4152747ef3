#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "kernels/base/device.h"
#include "runtime/loading/source.h"
#include "runtime/model.h"
#include "vision/image.h"

namespace kvlm {

struct GenerationResult;

struct CaptionerOptions {
  std::string kv = "f16";  ///< a cache policy, as for vlm-run --kv
  Device device{};
  int threads = 0;  ///< on the CPU; 0: one per core
  LoadOptions load{};
};

/// A loaded checkpoint that describes one picture or video at a time, greedily, with a cache just
/// large enough: the shortest way from a folder to words. Generator serves batches, turns and
/// sampling. One thread at a time.
class Captioner {
 public:
  using OnText = std::function<void(std::string_view)>;

  /// `checkpoint` is a folder (find_model() knows more names). Throws Error{kInvalidArgument} for a
  /// cache policy that cannot be read, Error{kUnsupported} for one that cannot serve this model and
  /// for a model or device that is not built in, Error{kCorruptFile} for a damaged or missing file.
  explicit Captioner(const std::filesystem::path& checkpoint, const CaptionerOptions& options = {});
  ~Captioner();

  /// Everything the model says of the picture: to `question`, or a caption if that is empty. At
  /// most `max_tokens` tokens; 0 is what the checkpoint asks for. `on_text` is given the text while
  /// it is made. Throws Error, and what on_text throws; the next picture is not affected.
  std::string describe(Image picture, std::string_view question = {}, int max_tokens = 0,
                       const OnText& on_text = nullptr);

  /// The same of a clip, which load_clip() reads. Throws also for a model that takes no videos.
  std::string describe(DecodedClip clip, std::string_view question = {}, int max_tokens = 0,
                       const OnText& on_text = nullptr);

  /// What the latest describe() generated: tokens, timings, what its cache held. Empty before the
  /// first, and after one that threw.
  const GenerationResult& last() const noexcept;

  Model& model() noexcept;
  Stream& stream() noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvlm
