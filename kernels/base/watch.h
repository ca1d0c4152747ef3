#pragma once

#include <cstddef>
#include <string_view>

namespace kvlm {

/// Who follows long work: is told how far each phase of it is, and may end it. A stream carries one
/// to everything that computes (Stream::set_watch).
class Watch {
 public:
  virtual ~Watch() = default;

  /// `done` of `total` equal steps of `phase` ("loading", "vision", "prefill") are done; 0 begins
  /// it, `total` ends it. Called once a tensor or a layer, by the thread that uses the stream.
  virtual void progress(std::string_view phase, size_t done, size_t total) = 0;

  /// Whether the work is to be given up. Asked by any thread, between pieces of work that take
  /// milliseconds.
  virtual bool cancelled() const noexcept = 0;
};

/// Throws Error{kCancelled} if `watch`, which may be null, wants no more. What was computed until
/// then is incomplete: a cache's sequences must be closed, outputs are undefined.
void give_up_if_cancelled(const Watch* watch);

/// watch->progress(), then give_up_if_cancelled(); nothing for null.
void report_progress(Watch* watch, std::string_view phase, size_t done, size_t total);

/// Piece number `index` of `pieces` equal ones of a longer phase: what it is told becomes its share
/// of what `whole`, which may be null, is told.
class PieceWatch final : public Watch {
 public:
  PieceWatch(Watch* whole, size_t index, size_t pieces)
      : whole_(whole), index_(index), pieces_(pieces) {}

  void progress(std::string_view phase, size_t done, size_t total) override {
    if (whole_ != nullptr) whole_->progress(phase, index_ * total + done, pieces_ * total);
  }
  bool cancelled() const noexcept override { return whole_ != nullptr && whole_->cancelled(); }

 private:
  Watch* whole_;
  size_t index_, pieces_;
};

}  // namespace kvlm
