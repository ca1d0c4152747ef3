#include "tools/common/device_list.h"

#include <fmt/format.h>

#include <charconv>

#include "kernels/base/error.h"
#include "kernels/base/printable.h"
#include "kernels/base/queue.h"
#include "tools/common/program.h"

namespace kvlm {

namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, text);
}

/// How many GPUs --gpus means.
int gpu_count(const std::string& gpus) {
  const int there = cuda::device_count();
  int count = there;
  const auto [rest, code] = std::from_chars(gpus.data(), gpus.data() + gpus.size(), count);
  const bool number = code == std::errc() && rest == gpus.data() + gpus.size() && count > 0;
  if (!number && gpus != "all") {
    refuse(fmt::format("--gpus is {}; expected 1 or more, or all", printable(gpus)));
  }
  const std::string needs =
      fmt::format("--gpus {} needs {}", gpus,
                  number ? fmt::format("{} GPU{}", count, count == 1 ? "" : "s") : "a GPU");
  if (there == 0) {
    try {
      static_cast<void>(cuda::device_facts(0));  // says why
    } catch (const Error& error) {
      refuse(fmt::format("{}, but {}", needs, error.what()));
    }
  }
  if (count > there) {
    refuse(fmt::format("{}, and there {}; give fewer, or --device cpu", needs,
                       there == 1 ? "is 1" : fmt::format("are {}", there)));
  }
  return count;
}

}  // namespace

std::vector<std::string> device_list(const std::string& device, const std::string& gpus) {
  std::vector<std::string> devices;
  if (!gpus.empty()) {
    if (device != "auto") refuse("--gpus chooses the devices; drop --device");
    const int count = gpu_count(gpus);
    for (int i = 0; i < count; ++i) devices.push_back(fmt::format("cuda:{}", i));
    return devices;
  }
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = device.find(',', begin);
    devices.push_back(device.substr(begin, end - begin));
    if (devices.back().empty()) {
      refuse(
          fmt::format("--device is \"{}\"; expected a device between commas, such as cuda:0,cuda:1",
                      printable(device)));
    }
  }
  if (devices.size() == 1) return devices;
  for (const std::string& each : devices) parse_device(each);  // refuses what is not there
  return devices;
}

}  // namespace kvlm
