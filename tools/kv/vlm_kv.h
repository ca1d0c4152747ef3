#pragma once

namespace kvlm {

/// The program vlm-kv. Returns its exit status.
int vlm_kv(int argc, char** argv);

}  // namespace kvlm
