#pragma once

#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/loading/plain_text.h"
#include "tools/run/records.h"

namespace kvlm {

/// Where the records of a batch come from, in order. One thread at a time.
class RecordSource {
 public:
  virtual ~RecordSource() = default;

  /// The next record; null if there is none yet or any more. `wait`: waits for one, but not much
  /// longer than kPatience.
  virtual std::shared_ptr<const Record> take(bool wait) = 0;
  /// Whether the last one was taken.
  virtual bool ended() const = 0;

  static constexpr int kPatienceMs = 50;
};

/// Records that are all there.
class ListedRecords final : public RecordSource {
 public:
  explicit ListedRecords(std::vector<Record> records);

  std::shared_ptr<const Record> take(bool wait) override;
  bool ended() const override { return next_ == records_.size(); }

 private:
  std::vector<std::shared_ptr<const Record>> records_;
  size_t next_ = 0;
};

/// The lines of standard input, each as soon as it is there. What is no line of records, such as a
/// JSON array, is read to its end first, as a file is.
class StreamedRecords final : public RecordSource {
 public:
  /// Leaves out the records that `skip`, which may complain of one by an Error, does not want.
  explicit StreamedRecords(std::function<bool(const Record&)> skip);

  /// Throws Error{kCorruptFile} if the input cannot be read or a line is too long.
  std::shared_ptr<const Record> take(bool wait) override;
  bool ended() const override { return ended_ && lines_.empty(); }

 private:
  /// Reads what is there; false if nothing came.
  bool read_more(int patience_ms);
  void parse_lines();

  std::function<bool(const Record&)> skip_;
  RecordLines parser_;
  TextDecoder decoder_{"--batch -"};
  std::string text_;  // decoded, and without a newline at its end so far
  std::deque<std::shared_ptr<const Record>> lines_;
  bool whole_ = false;  // no line of records: read to the end first
  bool begun_ = false;
  bool ended_ = false;
};

}  // namespace kvlm
