#pragma once

#include <sys/types.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/run/records.h"
#include "tools/run/settings.h"

namespace kvlm {

/// What one line of an output file says.
struct OutputLine {
  size_t offset = 0;          ///< of its first byte in the file
  size_t length = 0;          ///< with the newline, if it has one
  nlohmann::ordered_json id;  ///< null for a line of the input that had none
  bool failed = false;        ///< it has an error in place of an answer
  bool lean = false;          ///< an answer that does not say how it was made
  std::string text;           ///< the answer
  BatchSettings settings;     ///< as far as it says
  nlohmann::ordered_json asked = nlohmann::ordered_json::object();  ///< asked_of(), likewise
};

/// The lines of an output file.
struct OutputText {
  std::vector<OutputLine> lines;
  size_t good_bytes = 0;  ///< behind which a torn last line begins, if there is one
  bool open_end = false;  ///< the last line is whole but for its newline
};

/// Reads an output file. A last line that is torn, as a kill leaves it, is left out. Throws
/// Error{kCorruptFile}, naming `name`, if it holds anything but records of a batch, or two answers
/// to one record that differ.
OutputText parse_output(std::string_view text, const std::string& name);

/// The output file of a batch: every finished record is one complete line, or is not there. One
/// program at a time writes it.
class Output {
 public:
  /// Opens or creates the file and cuts off a torn last line; "-" is standard output, which holds
  /// no answers yet. With `lean` the settings are in a file of their own, PATH.run.json. Throws
  /// Error, leaving it as it is: kCorruptFile if it is no regular file, cannot be written, is being
  /// written by another program, or holds anything but records; kInvalidArgument if it has answers
  /// of other settings.
  Output(const std::string& path, const BatchSettings& settings, bool lean = false);
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  /// Takes the answers of another file of the same batch, such as a shard's, for answers of this
  /// one. With `join`, has() copies those of the records that it is asked about into this file. The
  /// other is neither written nor locked. Throws as the constructor.
  void read_also(const std::string& path, const BatchSettings& settings, bool join);
  /// Whether read_also() had the answer of a record that has() was asked about.
  bool used_others() const noexcept { return used_others_; }

  /// Whether the record has an answer. Throws Error{kInvalidArgument} if it was asked something
  /// else then.
  bool has(const Record& record);
  bool has_failures() const noexcept { return !failures_.empty(); }
  /// Whether a torn last line was cut off.
  bool repaired() const noexcept { return repaired_; }
  /// Fit for messages.
  std::string name() const;
  /// Answers that do not say under which settings they were given.
  size_t unsettled() const noexcept { return unsettled_; }

  /// Takes the errors of these records out of the file, so that each is tried again and written
  /// once, and those without an id, which the input gives again. Returns how many of the records
  /// had one. The file is replaced as a whole, or rewritten in a folder that takes no new file.
  size_t retry(const std::vector<Record>& records);

  /// Appends one line; on failure what was written of it is cut off again. Throws
  /// Error{kCorruptFile} if it cannot be written, or another program changed the file meanwhile.
  void append(const nlohmann::ordered_json& json);

 private:
  /// An answer in another file.
  struct Elsewhere {
    nlohmann::ordered_json asked;
    std::string line;  // only if it is to be copied
  };

  void open_locked();
  /// Compares the settings with those of PATH.run.json; if there is none, throws
  /// Error{kCorruptFile} if it is `expected`, and writes it if `write`. Returns whether it is
  /// there.
  bool share(const BatchSettings& settings, bool write, bool expected) const;
  bool is_stream() const { return path_ == kStandardOutput; }
  void require_settings(const OutputLine& line, const std::string& path,
                        const BatchSettings& settings) const;
  void close_file() noexcept;
  std::string read_all() const;
  /// Appends all of it, or nothing.
  void write_all(int descriptor, std::string_view text) const;
  /// Puts a file with this text in the place of the output; false if the folder takes no new file.
  bool replace(const std::string& text);
  /// Writes what follows the first `from` bytes anew, in place.
  void rewrite(const std::string& text, size_t from);
  void require_unchanged() const;
  [[noreturn]] void fail(const char* what, const char* cure) const;

  std::string path_;
  int descriptor_ = -1;
  off_t size_ = 0;
  bool repaired_ = false;
  size_t unsettled_ = 0;
  std::map<std::string, nlohmann::ordered_json> answered_;  // what was asked, by id as JSON
  std::map<std::string, Elsewhere> elsewhere_;              // by id as JSON
  bool used_others_ = false;
  std::vector<OutputLine> failures_;
};

}  // namespace kvlm
