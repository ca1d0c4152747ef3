#include "runtime/loading/model_path.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kvcache/spec/words.h"
#include "runtime/family.h"

// Finds the folder of a model by its name: a path, a name built in, or org/name[@revision] in the
// cache of Hugging Face's hub. Nothing is downloaded; what is missing is told with the command that
// fetches it.
namespace kvlm {

namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 3> kBundled = {"pocket-llava", "pocket-internvl",
                                                      "pocket-qwen"};

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorCode::kCorruptFile, message);
}

/// A path for a message: HF_HOME may hold anything. Segment by segment, as printable() shortens.
std::string shown(const fs::path& path) {
  std::string text;
  for (const fs::path& segment : path) {
    if (!text.empty() && !text.ends_with('/')) text += '/';
    text += printable(segment.string());
  }
  return text;
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

bool is_present(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Names of the entries of a folder that `wanted` accepts, sorted; none if it cannot be read.
std::vector<std::string> list(const fs::path& folder,
                              const std::function<bool(const fs::directory_entry&)>& wanted) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (wanted(*it)) names.push_back(it->path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

std::vector<std::string> subfolders(const fs::path& folder) {
  return list(folder, [](const fs::directory_entry& entry) {
    std::error_code ignored;
    return entry.is_directory(ignored);
  });
}

bool is_alphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

/// One segment of a path that cannot leave its folder: letters, digits, '.', '_', '-', not starting
/// with a dot.
bool is_segment(std::string_view text) {
  return !text.empty() && text.front() != '.' && std::ranges::all_of(text, [](char c) {
    return is_alphanumeric(c) || c == '.' || c == '_' || c == '-';
  });
}

bool is_commit(std::string_view text) {
  return !text.empty() && text.size() <= 64 && std::ranges::all_of(text, [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
  });
}

struct HubName {
  std::string organisation;
  std::string model;
  std::string revision;  // empty: not given

  std::string str() const { return organisation + "/" + model; }
};

/// Splits org/name[@revision], or returns nothing if `name` is not of that form.
std::optional<HubName> parse_hub_name(std::string_view name) {
  HubName hub;
  if (const size_t at = name.find('@'); at != std::string_view::npos) {
    hub.revision = name.substr(at + 1);
    name = name.substr(0, at);
    std::string_view rest = hub.revision;  // a branch may have several segments: refs/pr/1
    for (;;) {
      const size_t slash = rest.find('/');
      if (!is_segment(rest.substr(0, slash))) return std::nullopt;
      if (slash == std::string_view::npos) break;
      rest.remove_prefix(slash + 1);
    }
  }
  const size_t slash = name.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  hub.organisation = name.substr(0, slash);
  hub.model = name.substr(slash + 1);
  // "--" stands for the slash in the cache, so that a name holding it would be ambiguous.
  if (!is_segment(hub.organisation) || !is_segment(hub.model) ||
      name.find("--") != std::string_view::npos) {
    return std::nullopt;
  }
  return hub;
}

/// The name of a folder of the hub's cache: models--ORG--NAME.
std::optional<HubName> parse_repository(std::string_view folder) {
  constexpr std::string_view kModels = "models--";
  if (!folder.starts_with(kModels)) return std::nullopt;
  folder.remove_prefix(kModels.size());
  const size_t split = folder.find("--");
  if (split == std::string_view::npos) return std::nullopt;
  return parse_hub_name(fmt::format("{}/{}", folder.substr(0, split), folder.substr(split + 2)));
}

/// What people paste: a page of the hub, a name with a slash at its end, a folder of its cache.
std::optional<HubName> parse_pasted_name(std::string_view name) {
  for (const std::string_view page : {"https://", "hf://", "huggingface.co/", "hf.co/"}) {
    if (name.starts_with(page)) name.remove_prefix(page.size());
  }
  while (name.ends_with('/')) name.remove_suffix(1);
  const std::optional<HubName> repository = parse_repository(name);
  return repository ? repository : parse_hub_name(name);
}

constexpr const char* kNoGguf =
    "GGUF is not read; give the folder of the safetensors checkpoint that it was made from";

/// What to give for a name that is neither of a model nor of a folder.
std::string advice_on_name(const std::string& name) {
  if (name.ends_with(".gguf")) return kNoGguf;
  std::string lower = name;
  std::ranges::transform(lower, lower.begin(), [](char c) {
    return c == '_' ? '-' : c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  std::vector<std::string_view> bundled(kBundled.begin(), kBundled.end());
  bundled.emplace_back("pocket");
  const std::string_view near = nearest_spelling(lower, bundled);
  if (!near.empty()) return fmt::format("did you mean {}?", near);
  return "give the folder of a checkpoint, or download one, for example with `hf download "
         "llava-hf/llava-1.5-7b-hf`, and give its org/name";
}

[[noreturn]] void refuse_file(const fs::path& path) {
  const std::string extension = path.extension().string();
  if (extension == ".gguf") {
    throw Error(ErrorCode::kUnsupported, fmt::format("{}: {}", shown(path), kNoGguf));
  }
  const fs::path parent = path.parent_path();
  if (extension == ".safetensors" || extension == ".json") {
    fail(fmt::format("{}: is one file of a checkpoint; give its folder, {}", shown(path),
                     parent.empty() ? "." : shown(parent)));
  }
  fail(fmt::format("{}: is a file; give the folder that holds config.json and the weights",
                   shown(path)));
}

/// The folders that may hold the Hugging Face cache, most specific first.
std::vector<fs::path> hub_caches(const Environment& environment) {
  const auto read = [&](std::string_view variable) -> std::optional<fs::path> {
    std::optional<std::string> value = environment(variable);
    if (!value || value->empty()) return std::nullopt;
    if (value->starts_with("~/")) {
      if (const std::optional<std::string> home = environment("HOME")) value->replace(0, 1, *home);
    }
    return fs::path(*value);
  };
  std::vector<fs::path> caches;
  if (const auto cache = read("HF_HUB_CACHE")) caches.push_back(*cache);
  if (const auto home = read("HF_HOME")) caches.push_back(*home / "hub");
  if (const auto cache = read("XDG_CACHE_HOME")) caches.push_back(*cache / "huggingface" / "hub");
  if (const auto home = read("HOME")) caches.push_back(*home / ".cache" / "huggingface" / "hub");
  return caches;
}

std::string download_command(const HubName& hub) {
  return hub.revision.empty()
             ? fmt::format("hf download {}", hub.str())
             : fmt::format("hf download {} --revision {}", hub.str(), hub.revision);
}

/// What is said of a name before 16 GB of it are fetched. A name alone does not tell the family,
/// but those of other families usually say so.
std::string family_advice(const HubName& hub) {
  std::string name = hub.model;
  std::ranges::transform(name, name.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  std::vector<std::string_view> built_in;
  for (const Family& family : families()) {  // those of several spellings follow each other
    if (built_in.empty() || built_in.back() != family.name) built_in.push_back(family.name);
  }
  constexpr auto kOthers = std::to_array<std::string_view>(
      {"qwen-vl", "omni", "30b-a3b", "235b-a22b", "llava-next-video", "smolvlm", "idefics",
       "paligemma", "pixtral", "minicpm", "molmo"});
  const auto is_in_name = [&](std::string_view word) {
    return name.find(word) != std::string::npos;
  };
  constexpr auto kQuantized = std::to_array<std::string_view>(
      {"gguf", "bnb-4bit", "exl2", "nvfp4", "mxfp4", "hqq", "aqlm"});
  const auto quantized = std::ranges::find_if(kQuantized, is_in_name);
  if (quantized != kQuantized.end()) {
    return fmt::format(
        "its name says {}, quantized weights that are not read; use the 16-bit checkpoint that "
        "they "
        "were made from with --weights int4",
        *quantized);
  }
  const auto other = std::ranges::find_if(kOthers, is_in_name);
  if (other != kOthers.end()) {
    return fmt::format(
        "its name says {}, a family that is not supported; supported are {} (such as "
        "llava-hf/llava-1.5-7b-hf)",
        *other, fmt::join(built_in, ", "));
  }
  return fmt::format("if its family is supported ({}), download it with `{}`",
                     fmt::join(built_in, ", "), download_command(hub));
}

/// The commit that a file of refs/ names, or nothing if there is no such file. The content becomes
/// a part of a path, so anything but a commit is refused.
std::optional<std::string> read_ref(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  std::string content(256, '\0');
  file.read(content.data(), static_cast<std::streamsize>(content.size()));
  content.resize(static_cast<size_t>(file.gcount()));
  constexpr std::string_view kSpace = " \t\r\n";
  content.erase(content.find_last_not_of(kSpace) + 1);
  content.erase(0, std::min(content.find_first_not_of(kSpace), content.size()));
  if (!is_commit(content)) {
    fail(fmt::format("{}: holds \"{}\", which is not a commit; download the model again",
                     shown(path), printable(content)));
  }
  return content;
}

/// The name of the folder under snapshots/, or "" if this revision is not in the cache.
std::string choose_snapshot(const fs::path& repository, const HubName& hub) {
  const std::string revision = hub.revision.empty() ? "main" : hub.revision;
  if (const auto commit = read_ref(repository / "refs" / revision)) return *commit;
  if (!hub.revision.empty()) {
    return is_segment(revision) && is_folder(repository / "snapshots" / revision) ? revision : "";
  }
  const std::vector<std::string> snapshots = subfolders(repository / "snapshots");
  if (snapshots.size() > 1) {
    fail(
        fmt::format("{}: there is no refs/main to choose among its {} snapshots; name one of them: "
                    "{}@{}",
                    shown(repository), snapshots.size(), hub.str(),
                    fmt::join(snapshots, fmt::format(", {}@", hub.str()))));
  }
  return snapshots.empty() ? "" : snapshots.front();
}

/// The snapshot of a model whose folder is in the cache.
fs::path find_snapshot(const fs::path& repository, const HubName& hub) {
  const std::string snapshot = choose_snapshot(repository, hub);
  fs::path folder = repository / "snapshots" / snapshot;
  // A link whose blob was not finished does not count as present.
  if (!snapshot.empty() && is_present(folder / "config.json")) return folder;

  const auto unfinished = list(repository / "blobs", [](const fs::directory_entry& entry) {
    return entry.path().extension() == ".incomplete";
  });
  if (!unfinished.empty()) {
    fail(
        fmt::format("{}: the download is incomplete, {} files are unfinished ({}); finish it with "
                    "`{}`",
                    shown(repository), unfinished.size(), printable(unfinished.front()),
                    download_command(hub)));
  }
  if (snapshot.empty() || !is_folder(folder)) {
    const std::vector<std::string> snapshots = subfolders(repository / "snapshots");
    fail(fmt::format(
        "{}: holds no snapshot of revision {}{}; download it with `{}`", shown(repository),
        hub.revision.empty() ? "main" : hub.revision,
        snapshots.empty() ? std::string() : fmt::format(", only {}", fmt::join(snapshots, ", ")),
        download_command(hub)));
  }
  fail(
      fmt::format("{}: the snapshot has no config.json, so the download is incomplete; finish it "
                  "with `{}`",
                  shown(folder), download_command(hub)));
}

fs::path find_bundled(std::string_view name, const fs::path& bundled) {
  fs::path folder = bundled / name;
  if (is_folder(folder)) return folder;
  std::vector<std::string> present;
  for (const std::string_view other : kBundled) {
    if (is_folder(bundled / other)) present.emplace_back(other);
  }
  fail(fmt::format("the bundled model {} is not at {}; {}", name, folder.string(),
                   present.empty()
                       ? std::string("set KVLM_HOME to the folder that holds pocket/ (share/kvlm "
                                     "of an installed copy, tools of a checkout)")
                       : fmt::format("there are {}", fmt::join(present, ", "))));
}

}  // namespace

std::filesystem::path find_model(const std::string& name, const std::filesystem::path& bundled,
                                 const Environment& environment) {
  if (name == "pocket") return find_bundled("pocket-llava", bundled);
  if (std::ranges::find(kBundled, name) != kBundled.end()) return find_bundled(name, bundled);

  if (name.empty() || name.find('\0') != std::string::npos) {
    throw Error(ErrorCode::kInvalidArgument,
                "the model name is empty; give a folder, org/name or pocket");
  }
  if (is_folder(name)) {
    const fs::path folder =
        fs::path(name).has_filename() ? fs::path(name) : fs::path(name).parent_path();
    const std::optional<HubName> cached = parse_repository(folder.filename().string());
    const bool repository = cached && !is_present(folder / "config.json");
    return repository ? find_snapshot(folder, *cached) : fs::path(name);
  }
  if (is_present(name)) refuse_file(name);
  const std::optional<HubName> hub = parse_pasted_name(name);
  if (!hub) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("there is no model {}: no folder has that name, and it is neither "
                            "org/name[@revision] nor one of pocket, {}; {}",
                            printable(name), fmt::join(kBundled, ", "), advice_on_name(name)));
  }
  std::vector<std::string> looked_at = {printable(name)};
  for (const fs::path& cache : hub_caches(environment)) {
    const fs::path repository =
        cache / fmt::format("models--{}--{}", hub->organisation, hub->model);
    if (is_folder(repository)) return find_snapshot(repository, *hub);
    looked_at.push_back(shown(repository));
  }
  fail(fmt::format("there is no model {}: looked for the folders {}; {}", printable(name),
                   fmt::join(looked_at, ", "), family_advice(*hub)));
}

}  // namespace kvlm
