#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/runtime/golden.h"
#include "tests/runtime/loading/safetensors_writer.h"

namespace kvlm::test {

/// Logits of every row of a prompt.
inline std::vector<float> logits(const LoadedModel& model, const GoldenCase& golden) {
  std::vector<float> all;
  const auto cache = model.cache("f32");
  Generator generator(*model, *cache, model.stream());
  generator.set_tap([&](std::string_view name, ConstTensorView view) {
    if (name == "logits_prefill") {
      all.assign(view.as<float>(), view.as<float>() + view.elements());
    }
  });
  generator.admit(golden.request(), {});
  return all;
}

inline std::vector<FileTensor> read_tensors(const std::filesystem::path& file) {
  const GoldenTensors tensors(file);
  std::vector<FileTensor> all;
  for (const SafetensorsEntry& entry : tensors.entries()) {
    all.push_back({entry.name, entry.dtype, entry.shape, tensors.raw(entry)});
  }
  return all;
}

/// A copy of a golden checkpoint with these tensors in one file.
inline void write_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                             const std::vector<FileTensor>& tensors) {
  for (const auto& entry : std::filesystem::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_regular_file() || name.find("safetensors") != std::string::npos) continue;
    std::filesystem::copy_file(entry.path(), to / name);
  }
  write_file(to / "model.safetensors", safetensors(tensors));
}

/// Loads a golden folder under each of the spellings of its names.json, which are `spelled`.
inline void expect_same_logits_of_every_spelling(const std::string& name,
                                                 const std::set<std::string>& spelled) {
  const std::filesystem::path folder = golden_root() / name;
  const std::vector<FileTensor> saved = read_tensors(folder / "model.safetensors");
  const nlohmann::json spellings =
      nlohmann::json::parse(read_file(folder / "names.json")).at("spellings");
  const nlohmann::json manifest = golden_manifest(folder);
  const GoldenCase golden{folder, folder, manifest.at("cases").at(0)};
  const std::vector<float> expected = logits(LoadedModel(folder), golden);
  ASSERT_GT(expected.size(), size_t{320});
  std::set<std::string> seen;
  for (const auto& [spelling, names] : spellings.items()) {
    std::map<std::string, std::string> from_saved;
    for (const auto& [canonical, written] : spellings.at("saved").items()) {
      from_saved[written] = names.at(canonical);
    }
    std::vector<FileTensor> tensors = saved;
    for (FileTensor& tensor : tensors) tensor.name = from_saved.at(tensor.name);
    TempFolder temp;
    write_checkpoint(folder, temp.path(), tensors);
    EXPECT_EQ(logits(LoadedModel(temp.path()), golden), expected) << spelling;
    seen.insert(spelling);
  }
  EXPECT_EQ(seen, spelled);
}

}  // namespace kvlm::test
