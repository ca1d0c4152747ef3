#include "kvcache/plan/nominal.h"

namespace kvlm {

double nominal_bits(std::span<const ScopeClaim> scopes, DType rows, const ShareMap& share) {
  const size_t layers = scopes.front().packers.size();
  double bits = 0;
  for (size_t layer = 0; layer < layers; ++layer) {
    double packed_slots = 0;
    int packed_scopes = 0;
    for (const ScopeClaim& scope : scopes) {
      if (scope.packers[layer] == nullptr) continue;
      packed_slots += scope.slots;
      ++packed_scopes;
    }
    if (packed_scopes == 0) {
      bits += 2 * 8.0 * static_cast<double>(dtype_bytes(rows));
      continue;
    }
    for (const ScopeClaim& scope : scopes) {
      const Quantizer* packer = scope.packers[layer];
      if (packer == nullptr) continue;
      const double weight = packed_slots > 0 ? scope.slots / packed_slots : 1.0 / packed_scopes;
      for (const KvSide side : {KvSide::kKeys, KvSide::kValues}) {
        const std::vector<int>& owners =
            side == KvSide::kKeys ? share.key_owner : share.value_owner;
        const bool shares = share.any() && owners[layer] != static_cast<int>(layer);
        if (!shares) bits += weight * packer->packing(side, static_cast<int>(layer)).nominal_bits;
      }
    }
  }
  return bits / (2 * static_cast<double>(layers));
}

}  // namespace kvlm
