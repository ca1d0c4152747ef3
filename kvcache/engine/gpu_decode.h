#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/decode_table.h"
#include "kvcache/engine/gained_counts.h"
#include "kvcache/engine/lane_describer.h"
#include "kvcache/engine/sequence.h"
#include "kvcache/engine/store.h"
#include "kvcache/engine/table_reader.h"
#include "kvcache/engine/traits.h"
#include "kvcache/extensions/key_basis.h"
#include "kvcache/extensions/visual_remap.h"

namespace kvlm {

/// Decode on a GPU, which keeps the counters of what a sequence holds (DecodeTable). The host says
/// what a sequence holds when its prompt has ended, or when the host itself has changed it, and
/// counts the rows that follow when somebody asks (GainedCounts). A sequence whose rows the GPU
/// cannot count (Sequence.told_anew) changes on the host at the end of every step.
class GpuDecode {
 public:
  GpuDecode(const CacheTraits& traits, SequenceStore& store, KeyBasisChange& key_basis,
            VisualRemap& remap);

  /// The cache is on a GPU.
  bool serves() const noexcept { return table_ != nullptr; }
  void reserve(const Workload& load);

  /// Begins a step: what the table does not know of its sequences it is told.
  void begin(std::span<const StepRows> step, Stream& stream);
  /// Appends and attends the step's generated rows, as DecodeAttention does.
  void attend(int layer, const float* q, ConstTensorView k, ConstTensorView v, TensorView out,
              float scale, Stream& stream);
  /// `out` of attend() may take the place of the queries.
  bool attends_in_place(int layer) const noexcept { return table_->attends_in_place(layer); }
  /// Ends a step: packs the windows that are full, and drops rows. Returns the sequences in which
  /// the host has to do so, caught up.
  std::span<Sequence* const> end(std::span<const StepRows> step, Stream& stream);
  /// Prompts have ended with the step. The table is told of their sequences while the GPU has
  /// something to do: at once, or where the host has `waited` for the end of first prompts, so that
  /// it has nothing, by prepare_sequences() or when a step is of them.
  void end_prompts(std::span<const StepRows> step, bool waited, Stream& stream);
  /// The GPU is at a prompt, and the host ahead of it: the table is told of sequences that wait,
  /// and the host's part is made of the next that opens. Without a GPU nothing is done.
  void prepare_sequences(Stream& stream);
  /// The step that has begun will not be ended. What its layers have added to attention weights
  /// stays, as on the host.
  void give_up();

  /// KvCache::repetition() of the step that has begun.
  uint64_t repetition() const noexcept;
  /// Counts on the host the rows that a sequence has gained, because the host is about to change
  /// what the sequence holds.
  void take_back(Sequence& sequence) const;
  /// Counts on the host the rows that a sequence has gained, between steps. The GPU goes on to
  /// serve it, once it has been placed again if it drops_on_gpu().
  void catch_up(Sequence& sequence) const { reader_.catch_up(sequence); }
  /// Counts what the GPU has made of sequences.
  const TableReader& reader() const noexcept { return reader_; }
  /// Tells the arena what sequences that are placed use.
  void count_bytes() const;
  /// How often a sequence was laid for the GPU: once when its prompt has ended, and whenever the
  /// host has changed what it holds.
  int64_t laid() const noexcept { return laid_; }
  /// Slopes that the remaps of a layer have clamped. Throws Error{kDevice}.
  int64_t guarded_remaps(int layer) const { return table_->guarded_remaps(layer); }

 private:
  /// What the end of a step comes to, over its sequences.
  struct StepEnd {
    std::array<bool, 2> due{};  // by KvSide: some window is full that the table packs
    bool drops = false;         // the table is told of rows that go
    bool placed = false;        // some sequence is
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
  std::vector<TableRow> known_rows_;       // whose queries key_basis_ knows
  bool basis_known_ = false;               // it knows those of this step
  std::vector<LaneDescriber> describers_;  // one for each of the table's drafts
  std::vector<SequenceId> placing_;
  std::vector<SequenceId> waiting_;  // their prompts have ended
  std::vector<int> dropped_;         // (rows of this step, layers)
  std::vector<int> of_sequence_;     // (layers,) of one
  std::vector<Sequence*> of_host_;   // to flush and to drop
  const float* queries_ = nullptr;   // where those in another basis are
  int64_t laid_ = 0;
  mutable bool bytes_known_ = true;  // to the arena, of sequences whose packed rows the GPU drops
};

}  // namespace kvlm
