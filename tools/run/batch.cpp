#include "tools/run/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "kernels/base/error.h"
#include "kvcache/registry.h"
#include "runtime/prompt.h"
#include "tools/common/messages.h"
#include "tools/common/program.h"
#include "tools/common/progress.h"
#include "tools/run/output.h"
#include "tools/run/records.h"
#include "tools/run/report.h"
#include "vision/image.h"

namespace kvlm {

namespace {

using Json = nlohmann::ordered_json;

/// All records through one generator, up to batch_size of them at a time.
class Batch {
 public:
  Batch(const RunOptions& options, Session& session, std::vector<Record> records, Output& output)
      : options_(options),
        session_(session),
        records_(std::move(records)),
        output_(output),
        cache_(session.make_cache(static_cast<int>(std::clamp<size_t>(
                                      records_.size(), 1, static_cast<size_t>(options.batch_size))),
                                  rows_of_longest(), options.kv_memory)),
        generator_(session.model(), *cache_, session.stream()),
        progress_("batch", records_.size(), options.quiet) {}

  int run() {
    while (!interrupted()) {
      while (!interrupted() && next_ < records_.size() && running_.size() < limit_) start_next();
      if (running_.empty()) break;
      generator_.step();
      generator_.deliver();
      collect();
    }
    progress_.finish();
    if (!options_.quiet) {
      print_message("batch: {} of {} records done, {} failed\n", done_, records_.size(), failed_);
    }
    if (interrupted()) return kExitInterrupted;
    return failed_ > 0 ? kExitFailed : 0;
  }

 private:
  struct Running {
    int key;
    const Record* record;
  };

  /// An upper bound of the tokens of any record, without opening a picture.
  int rows_of_longest() {
    Model& model = session_.model();
    const int context = model.decoder().max_positions();
    const int max_tokens = options_.max_tokens.value_or(model.defaults().max_tokens);
    size_t longest = 1;
    for (const Record& record : records_) {
      if (!record.error.empty()) continue;
      const std::vector<ChatMessage> messages =
          conversation(question(record), record.images.size());
      const size_t text_rows = model.tokenizer().encode(model.render(messages)).size();
      longest = std::max(longest,
                         text_rows +
                             record.images.size() * static_cast<size_t>(model.max_image_tokens()) +
                             static_cast<size_t>(max_tokens));
    }
    return static_cast<int>(std::min<size_t>(longest, static_cast<size_t>(context)));
  }

  /// What a record asks: its own prompt, else -p, else for a caption.
  std::string question(const Record& record) {
    if (!record.prompt.empty()) return record.prompt;
    if (!options_.prompt.empty()) return options_.prompt;
    return std::string(session_.model().caption_prompt());
  }

  std::vector<ChatMessage> conversation(const std::string& text, size_t images) {
    std::vector<ChatMessage> messages = opening(options_);
    messages.push_back(
        user_message(text, static_cast<int>(images), session_.model().image_token()));
    return messages;
  }

  void start_next() {
    const Record& record = records_[next_];
    if (!record.error.empty()) {
      ++next_;
      write_error(record, record.error);
      return;
    }
    try {
      GenerationRequest request = base_request(options_, session_.model());
      request.id = name_of(record);
      request.messages = conversation(question(record), record.images.size());
      for (const std::string& image : record.images) request.images.push_back(load_image(image));
      const int key = generator_.admit(std::move(request), {});
      generator_.deliver();
      running_.push_back({key, &record});
      ++next_;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDevice) throw;  // lost for the records that follow, too
      if (error.code() == ErrorCode::kOutOfMemory && !running_.empty()) {
        limit_ = running_.size();  // the cache holds no more at a time; wait for one to leave
        return;
      }
      ++next_;
      write_error(record, error.what());
    }
    collect();
  }

  void collect() {
    for (auto entry = running_.begin(); entry != running_.end();) {
      if (!generator_.finished(entry->key)) {
        ++entry;
        continue;
      }
      const GenerationResult result = generator_.take(entry->key);
      Json json{{"id", entry->record->id}};
      json.update(result_json(result, session_, session_.model(), cache_->spec()));
      output_.append(json);
      entry = running_.erase(entry);
      count();
      limit_ = static_cast<size_t>(options_.batch_size);  // its memory is free: try again
    }
  }

  static std::string name_of(const Record& record) {
    return record.id.is_null() ? fmt::format("line {}", record.line)
                               : fmt::format("record {}", record.id.dump());
  }

  void write_error(const Record& record, const std::string& message) {
    Json json{{"id", record.id}};
    if (record.id.is_null()) json["line"] = record.line;
    json["error"] = message;
    output_.append(json);
    if (!options_.quiet) {
      progress_.clear();
      const std::string who = name_of(record);  // which some messages start with already
      print_message("vlm-run: {}{}\n", message.starts_with(who) ? "" : who + ": ", message);
    }
    ++failed_;
    count();
  }

  void count() {
    ++done_;
    progress_.update(done_, fmt::format("({} running)", running_.size()));
  }

  const RunOptions& options_;
  Session& session_;
  std::vector<Record> records_;
  Output& output_;
  std::unique_ptr<KvCache> cache_;
  Generator generator_;
  Progress progress_;
  std::vector<Running> running_;
  size_t limit_ = static_cast<size_t>(options_.batch_size);
  size_t next_ = 0;
  size_t done_ = 0;
  size_t failed_ = 0;
};

}  // namespace

std::function<int(Session&)> prepare_batch(const RunOptions& options) {
  std::vector<Record> records = read_records(options.batch_in);
  const auto output = std::make_shared<Output>(options.batch_out);
  const size_t all = records.size();
  std::erase_if(records, [&](const Record& record) { return output->has(record); });
  if (!options.quiet) {
    if (output->repaired()) {
      print_message("batch: cut off a torn last line of {}\n", options.batch_out);
    }
    if (records.size() < all) {
      print_message("batch: {} of {} records are in {} already\n", all - records.size(), all,
                    options.batch_out);
    }
    const auto again = std::count_if(records.begin(), records.end(), [&](const Record& record) {
      return output->failed_before(record);
    });
    if (again > 0) {
      print_message("batch: {} record{} of {} failed before and {} tried again\n", again,
                    again == 1 ? "" : "s", options.batch_out, again == 1 ? "is" : "are");
    }
  }
  return [&options, output, records = std::move(records)](Session& session) {
    return Batch(options, session, records, *output).run();
  };
}

}  // namespace kvlm
