#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/decode_table.h"
#include "kvcache/engine/gained_counts.h"
#include "kvcache/engine/head_describer.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/store.h"
#include "kvcache/engine/table_reader.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/key_basis.h"
#include "kvcache/extensions/visual_remap.h"

namespace kvlm {

/// Decode on a GPU, which keeps the counters of each sequence (DecodeTable). The host uploads a
/// sequence when its prompt has ended or the host has changed it. Later tokens are counted on the
/// host only when needed (GainedCounts). If the GPU cannot count a sequence (Sequence.told_anew),
/// the host updates it at the end of every step.
class GpuDecode {
 public:
  GpuDecode(const CacheTraits& traits, SequenceStore& store, KeyBasisChange& key_basis,
            VisualRemap& remap);

  /// The cache is on a GPU.
  bool serves() const noexcept { return table_ != nullptr; }
  void reserve(const Workload& load);

  /// Begins a step: uploads sequences that are not on the table.
  void begin(std::span<const StepRows> step, Stream& stream);
  /// Stores the step's generated tokens and computes their attention, as DecodeAttention does.
  void attend(int layer, const float* q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream);
  /// `out` of attend() may alias the queries.
  bool attends_in_place(int layer) const noexcept { return table_->attends_in_place(layer); }
  /// Ends a step: packs full windows and evicts. Returns the sequences whose packing or eviction
  /// the host must do, caught up.
  std::span<Sequence* const> end(std::span<const StepRows> step, Stream& stream);
  /// Uploads sequences whose prompts ended with the step, while the GPU is busy. If the host has
  /// `waited` for the end of first prompts, the GPU is idle: then prepare_sequences() uploads them,
  /// or the first step that contains them.
  void end_prompts(std::span<const StepRows> step, bool waited, Stream& stream);
  /// To be called while the GPU computes a prompt. Uploads waiting sequences and allocates the
  /// host's state of the next one. Does nothing without a GPU.
  void prepare_sequences(Stream& stream);
  /// Abandons the current step. Its additions to attention weights stay, as on the CPU.
  void give_up();

  /// KvCache::repetition() of the current step.
  uint64_t repetition() const noexcept;
  /// Updates the host's state of a sequence and removes it from the table, because the host is
  /// about to change it.
  void take_back(Sequence& sequence) const;
  /// Updates the host's state of a sequence between steps. It stays on the table, unless it
  /// drops_on_gpu(): then it is uploaded again.
  void catch_up(Sequence& sequence) const { reader_.catch_up(sequence); }
  const TableReader& reader() const noexcept { return reader_; }
  /// Reports the bytes of placed sequences to the arena.
  void count_bytes() const;
  /// Number of uploads: one per sequence when its prompt has ended, and one whenever the host has
  /// changed it.
  int64_t laid() const noexcept { return laid_; }
  /// Slopes that the remaps of a layer have clamped. Throws Error{kDevice}.
  int64_t guarded_remaps(int layer) const { return table_->guarded_remaps(layer); }

 private:
  /// Work left at the end of a step, over its sequences.
  struct StepEnd {
    std::array<bool, 2> due{};  // by KvSide: the table has a full window to pack
    bool drops = false;         // the table has to evict
    bool placed = false;        // some sequence evicts in place
  };

  void place_generating(std::span<const StepRows> step, Stream& stream);
  bool counts(const Sequence& sequence) const;
  void place_all(std::span<const SequenceId> ids, Stream& stream);
  void place_some(std::span<const SequenceId> some, Stream& stream);
  void lay(SequenceId id, size_t draft);
  void end_step_of(Sequence& sequence, size_t number, StepEnd& found);
  void change_queries(int layer, const float* q, Stream& stream);

  const CacheTraits& traits_;
  SequenceStore& store_;
  KeyBasisChange& key_basis_;
  VisualRemap& remap_;
  GainedCounts counts_;
  std::unique_ptr<DecodeTable> table_;
  TableReader reader_;
  std::vector<TableRow> rows_;             // of this step
  std::vector<TableRow> known_rows_;       // of the queries in key_basis_
  bool basis_known_ = false;               // key_basis_ has the queries of this step
  std::vector<HeadDescriber> describers_;  // one per draft of the table
  std::vector<SequenceId> placing_;
  std::vector<SequenceId> waiting_;  // to be uploaded by prepare_sequences()
  std::vector<int> dropped_;         // (rows of this step, layers) slots to evict
  std::vector<int> of_sequence_;     // (layers,) of one sequence
  std::vector<Sequence*> of_host_;   // for the host to flush and evict
  const float* queries_ = nullptr;   // queries in another basis
  int64_t laid_ = 0;
  // The arena has the current bytes of sequences that evict packed tokens on the GPU.
  mutable bool bytes_known_ = true;
};

}  // namespace kvlm
