#include "llm/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <queue>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "llm/unicode.h"

// Byte pair encoding: a piece of text to symbols, then merges by rank with a queue of candidate
// pairs; merged symbols stay in a linked list, and candidates that no longer stand are skipped when
// they come up.
namespace kvlm {

namespace {

uint64_t pair_key(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

[[noreturn]] void corrupt(const std::string& name, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("{}: model: {}; download the file again", name, printable(what)));
}

}  // namespace

Bpe::Bpe(const JsonPart& model) {
  const std::string& name = model.file();
  // Old files leave the type out; what they hold is BPE if it has merges.
  const std::string type = model.at("type").text("BPE");
  if (type != "BPE" || model.at("merges").is_null()) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: model type {} is not supported; use a tokenizer with a BPE model",
                            name, type == "BPE" ? "without merges" : printable(type)));
  }
  if (const double dropout = model.at("dropout").number(0); dropout != 0) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}: model.dropout {} would make encoding random; set it to null", name,
                            dropout));
  }
  prefix_ = model.at("continuing_subword_prefix").text("");
  suffix_ = model.at("end_of_word_suffix").text("");
  fuse_unk_ = model.at("fuse_unk").flag(false);
  ignore_merges_ = model.at("ignore_merges").flag(false);
  byte_fallback_ = model.at("byte_fallback").flag(false);
  read_vocab(model.at("vocab"));
  read_merges(model.at("merges"));
  if (const auto unk = model.at("unk_token").text(""); !unk.empty()) {
    unk_id_ = id_of(unk);
    if (!unk_id_) corrupt(name, fmt::format("unk_token \"{}\" is not in the vocabulary", unk));
  }
  for (int byte = 0; byte < 256; ++byte) {
    byte_ids_[static_cast<size_t>(byte)] = id_of(fmt::format("<0x{:02X}>", byte)).value_or(-1);
  }
}

void Bpe::read_vocab(const JsonPart& vocab) {
  if (!vocab.value().is_object()) vocab.fail("an object");
  const std::string& name = vocab.file();
  ids_.reserve(vocab.value().size());
  for (const auto& [token, value] : vocab.value().items()) {
    const int64_t id = value.is_number_integer() ? value.get<int64_t>() : -1;
    if (id < 0 || id > kMaxTokenId) {
      corrupt(name, fmt::format("vocab[\"{}\"] is {}; expected an id from 0 to {}", token,
                                value.dump(), kMaxTokenId));
    }
    const auto index = static_cast<size_t>(id);
    if (index >= tokens_.size()) tokens_.resize(index + 1);
    if (tokens_[index]) {
      corrupt(name, fmt::format("\"{}\" and \"{}\" both have id {}", *tokens_[index], token, id));
    }
    tokens_[index] = token;
    ids_.emplace(token, static_cast<int32_t>(id));
  }
}

void Bpe::read_merges(const JsonPart& merges) {
  if (!merges.value().is_array()) merges.fail("a list");
  const std::string& name = merges.file();
  merges_.reserve(merges.value().size());
  int32_t rank = 0;
  std::string joined;
  for (const auto& merge : merges.value()) {
    std::string_view left;
    std::string_view right;
    if (merge.is_string()) {
      const std::string_view both = merge.get_ref<const std::string&>();
      const size_t space = both.find(' ');
      if (space == both.npos || both.find(' ', space + 1) != both.npos) {
        corrupt(name, fmt::format("merge {} is \"{}\"; expected two tokens and a space between",
                                  rank, both));
      }
      left = both.substr(0, space);
      right = both.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      left = merge[0].get_ref<const std::string&>();
      right = merge[1].get_ref<const std::string&>();
    } else {
      corrupt(name, fmt::format("merge {} is neither a string nor a pair", rank));
    }
    joined = left;
    joined += right.substr(right.starts_with(prefix_) ? prefix_.size() : 0);
    const auto left_id = id_of(left);
    const auto right_id = id_of(right);
    const auto id = id_of(joined);
    if (!left_id || !right_id || !id) {
      corrupt(name, fmt::format("merge {} (\"{}\" + \"{}\") uses or makes a token that is not in "
                                "the vocabulary",
                                rank, left, right));
    }
    merges_.insert_or_assign(pair_key(*left_id, *right_id), Merge{rank, *id});
    ++rank;
  }
}

std::optional<int32_t> Bpe::id_of(std::string_view token) const {
  const auto found = ids_.find(token);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const std::string* Bpe::token(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return nullptr;
  const auto& token = tokens_[static_cast<size_t>(id)];
  return token ? &*token : nullptr;
}

std::vector<Bpe::Symbol> Bpe::symbols_of(std::string_view piece) const {
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  bool unknown = false;  // an unknown is seen and not yet in `symbols`
  const auto push = [&symbols](int32_t id) {
    const auto index = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, index - 1, index + 1});
  };
  std::string affixed;
  for (size_t pos = 0; pos < piece.size();) {
    const size_t bytes = utf8_step(piece, pos).bytes;
    std::string_view symbol = piece.substr(pos, bytes);
    const bool first = pos == 0;
    pos += bytes;
    const bool last = pos == piece.size();
    if ((!first && !prefix_.empty()) || (last && !suffix_.empty())) {
      affixed = first ? "" : prefix_;
      affixed += symbol;
      if (last) affixed += suffix_;
      symbol = affixed;
    }
    if (const auto id = id_of(symbol)) {
      if (unknown) push(*unk_id_);
      unknown = false;
      push(*id);
      continue;
    }
    if (byte_fallback_) {
      const auto id_of_byte = [this](char c) { return byte_ids_[static_cast<uint8_t>(c)]; };
      if (std::ranges::all_of(symbol, [&](char c) { return id_of_byte(c) >= 0; })) {
        // A pending unknown stays pending: the reference emits it after these bytes.
        for (const char c : symbol) push(id_of_byte(c));
        continue;
      }
    }
    if (!unk_id_) continue;  // without an unknown token, what is not known is dropped
    if (unknown && !fuse_unk_) push(*unk_id_);
    unknown = true;
  }
  if (unknown) push(*unk_id_);
  if (!symbols.empty()) symbols.back().next = -1;
  return symbols;
}

void Bpe::merge_all(std::vector<Symbol>& symbols, const std::vector<bool>& barred) const {
  struct Candidate {
    int32_t rank;
    int32_t position;  // of the left symbol
    int32_t id;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto at = [&symbols](int32_t index) -> Symbol& {
    return symbols[static_cast<size_t>(index)];
  };
  const auto find = [&](int32_t left, int32_t right) -> const Merge* {
    const auto merge = merges_.find(pair_key(at(left).id, at(right).id));
    if (merge == merges_.end()) return nullptr;
    const auto id = static_cast<size_t>(merge->second.id);
    return id < barred.size() && barred[id] ? nullptr : &merge->second;
  };
  const auto consider = [&](int32_t left, int32_t right) {
    if (const Merge* merge = find(left, right)) queue.push({merge->rank, left, merge->id});
  };
  for (int32_t i = 0; i + 1 < static_cast<int32_t>(symbols.size()); ++i) consider(i, i + 1);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = at(best.position);
    if (!left.alive || left.next < 0) continue;
    Symbol& right = at(left.next);
    const Merge* merge = find(best.position, left.next);
    if (merge == nullptr || merge->id != best.id) continue;  // stale
    left.id = best.id;
    left.next = right.next;
    right.alive = false;
    if (left.next >= 0) {
      at(left.next).previous = best.position;
      consider(best.position, left.next);
    }
    if (left.previous >= 0) consider(left.previous, best.position);
  }
}

void Bpe::encode(std::string_view piece, const std::vector<bool>& barred,
                 std::vector<int32_t>& out) const {
  if (piece.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()) / 2) {
    throw Error(ErrorCode::kInvalidArgument, "text to encode is longer than 1 GiB");
  }
  if (ignore_merges_) {
    const auto id = id_of(piece);
    if (id && !(static_cast<size_t>(*id) < barred.size() && barred[static_cast<size_t>(*id)])) {
      out.push_back(*id);
      return;
    }
  }
  std::vector<Symbol> symbols = symbols_of(piece);
  merge_all(symbols, barred);
  for (const Symbol& symbol : symbols) {
    if (symbol.alive) out.push_back(symbol.id);
  }
}

}  // namespace kvlm
