#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "llm/json_part.h"

namespace kvlm {

/// Ids beyond this are taken for damage: the largest vocabularies have a quarter of a million.
constexpr int64_t kMaxTokenId = (1 << 22) - 1;

/// The BPE model of a tokenizer.json: one piece of text to ids.
///
/// Symbols start as single Unicode scalars; adjacent pairs are merged by rank, then position, with
/// a queue, so that n symbols take O(n log n). Source: Sennrich, Haddow & Birch 2016, "Neural
/// Machine Translation of Rare Words with Subword Units", section 3.2.
class Bpe {
 public:
  /// The member "model" of a tokenizer.json. Throws Error{kCorruptFile | kUnsupported}.
  explicit Bpe(const JsonPart& model);

  /// Appends the ids of `piece` (valid UTF-8). No merge results in an id that is set in `barred`.
  void encode(std::string_view piece, const std::vector<bool>& barred,
              std::vector<int32_t>& out) const;

  std::optional<int32_t> id_of(std::string_view token) const;
  /// The token's string, or null outside the vocabulary.
  const std::string* token(int32_t id) const;
  /// Largest id + 1.
  int32_t vocab_size() const { return static_cast<int32_t>(tokens_.size()); }

 private:
  struct Merge {
    int32_t rank;
    int32_t id;  // of the two joined
  };
  struct Symbol {
    int32_t id;
    int32_t previous;  // index, -1 at the ends
    int32_t next;
    bool alive = true;
  };
  struct StringHash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  void read_vocab(const JsonPart& vocab);
  void read_merges(const JsonPart& merges);
  std::vector<Symbol> symbols_of(std::string_view piece) const;
  void merge_all(std::vector<Symbol>& symbols, const std::vector<bool>& barred) const;

  std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>> ids_;
  std::vector<std::optional<std::string>> tokens_;
  std::unordered_map<uint64_t, Merge> merges_;  // left id << 32 | right id
  std::string prefix_;                          // continuing_subword_prefix
  std::string suffix_;                          // end_of_word_suffix
  std::optional<int32_t> unk_id_;
  bool fuse_unk_ = false;
  bool ignore_merges_ = false;
  bool byte_fallback_ = false;
  std::array<int32_t, 256> byte_ids_{};  // of "<0xHH>", -1: none
};

}  // namespace kvlm
