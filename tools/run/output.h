#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tools/run/records.h"

namespace kvlm {

/// The output file: every finished record is one complete line, or is not there.
class Output {
 public:
  /// Opens for appending, cuts off a torn last record, and notes what is there already. A file that
  /// holds anything but records is refused and left as it is.
  explicit Output(const std::string& path);
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  bool has(const Record& record) const;
  bool repaired() const noexcept { return repaired_; }
  /// Whether an earlier start could not serve it; it is tried again, and the later line counts.
  bool failed_before(const Record& record) const;

  /// Appends one line; on failure what was written of it is cut off again.
  void append(const nlohmann::ordered_json& json);

 private:
  [[noreturn]] void fail(const char* what, const char* cure) const;
  [[noreturn]] void refuse(const std::string& line) const;
  void read_existing();
  /// Notes a line's record; whether it is one. A record that failed counts as not there.
  bool note(const std::string& line);

  std::string path_;
  int descriptor_ = -1;
  off_t size_ = 0;
  bool repaired_ = false;
  std::set<std::string> ids_;                // of records that were served
  std::set<nlohmann::ordered_json> failed_;  // ids, or lines without one, of those that were not
};

}  // namespace kvlm
