#include "tools/common/memory.h"

#include "kernels/base/buffer.h"
#include "kernels/base/queue.h"

namespace kvlm {

nlohmann::ordered_json memory_json(Device device, const Model& model) {
  const MemoryHeld held = memory_held(device);
  const bool on_gpu = device.kind == DeviceKind::kCuda;
  nlohmann::ordered_json json{{"weights_bytes", on_gpu ? held.weights : model.weight_bytes()},
                              {"weights_format", model.weight_format()},
                              {"cache_bytes", held.cache},
                              {"workspace_bytes", held.workspace}};
  if (!on_gpu) return json;
  const cuda::DeviceUse use = cuda::device_use(device.index);
  json["rounding_bytes"] = held.rounding;
  json["context_bytes"] = use.context_bytes;
  json["code_bytes"] = use.code_bytes;
  json["device_bytes"] = use.device_bytes;
  return json;
}

}  // namespace kvlm
