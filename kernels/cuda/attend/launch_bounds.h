#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/cuda/attend/attend_layer.h"
#include "kernels/cuda/table/count_rows.h"

namespace kvlm::cuda::packed {

/// How large the launches of a DecodeTable have to be, at most, whichever lanes a step is of:
/// bounds grow with what lanes are noted, so that steps launch the same while nothing new comes.
class LaunchBounds {
 public:
  LaunchBounds(int layers, int side_runs);

  /// A run at a position of a side has at most `slots` slots, in lanes of at most `longest`.
  void note(int layer, bool keys, int position, const DeviceRun& run, int slots, int longest);
  /// Which kernels serve a lane; of a fused one, its sources of queries.
  void note_kind(int layer, const DeviceLane& lane, int sources);
  /// A lane that picture_lanes.cu serves has so many packed rows.
  void note_picture(int layer, int slots);
  /// Adds what another table of this shape, or part of it, has noted.
  void take(const LaunchBounds& other);
  /// Splits of keys have at most so many slots.
  void cut_keys(int slots);

  int key_slots() const noexcept { return key_slots_; }
  /// Some lanes of a layer are picture_lanes.cu's.
  bool has_pictures(int layer) const;
  /// Splits of a lane's keys, or values, at most.
  int parts(int layer, bool keys) const;
  /// The launches of a layer for so many lanes, but for what the lanes' table knows.
  LayerLaunch layer_launch(int layer, int lanes) const;

  bool changed = true;  ///< since its user has last said otherwise

 private:
  /// What launches depend on, of the keys or the values of a layer.
  struct SideBounds {
    std::array<int, kMostRuns> slots{};                  // of a run, by position
    std::array<int, kMostRuns> listed{};                 // splits that the host has cut
    std::array<uint32_t, kCodeKernels + 1> positions{};  // of a kernel's runs, a bit each
    uint32_t ordered = 0;            // positions of runs whose slots are selected, served in order
    std::vector<int> block_rows{1};  // that rows packed evenly have
  };

  template <class T>
  void grow(T& bound, T to) {
    if (bound >= to) return;
    bound = to;
    changed = true;
  }
  void set(uint32_t& bits, uint32_t more) {
    changed |= (bits & more) != more;
    bits |= more;
  }
  void take(SideBounds& side, const SideBounds& other);
  void take_kinds(int layer, const LaneKinds& more);
  void note_block_rows(SideBounds& side, int rows);
  int bound(int layer, bool keys, int position) const;
  ServedByKernel served(int layer, bool keys, unsigned lanes) const;

  std::vector<std::array<SideBounds, 2>> sides_;  // (layers,)
  std::vector<LaneKinds> kinds_;                  // (layers,)
  int side_runs_;
  int key_slots_ = kAnySplitSlots;
};

}  // namespace kvlm::cuda::packed
