#include "kernels/row_batch.h"

#include <algorithm>
#include <vector>

#include "kernels/check.h"

// RowBatch: decode attention over full rows of many KV heads at once. Runs are cut into splits,
// whose softmax states are merged (attention.h).
namespace kvlm {

namespace {

using check::refuse;

void check_run(const KeyValueRows& run) {
  if (!check::is_floating(run.dtype)) {
    refuse("RowBatch: a segment holds {}, expected f32, f16 or bf16", dtype_name(run.dtype));
  }
  if (run.rows < 0 || (run.rows > 0 && (run.keys == nullptr || run.values == nullptr))) {
    refuse("RowBatch: a segment claims {} tokens but has no data", run.rows);
  }
}

constexpr int64_t kRowsPerSplit = 256;

/// What a call works with: batches of many layers have it in common.
struct Workspace {
  std::vector<DecodeSplit> pieces;
  std::vector<SoftmaxState> states;
  std::vector<MergeJob> merges;
  std::vector<float> floats;  // of states: max, sum (q_per_kv), out (q_per_kv, head_dim)

  static Workspace& here() {
    static thread_local Workspace workspace;
    return workspace;
  }
  void reserve(size_t heads, size_t count, size_t state_size) {
    merges.reserve(heads);
    pieces.reserve(count);
    states.reserve(count);
    if (floats.size() < count * state_size) floats.resize(count * state_size);
  }
};

}  // namespace

struct RowBatch::State {
  int q_per_kv = 0;
  int head_dim = 0;
  std::vector<RowHead> heads;
  std::vector<KeyValueRows> runs;  // of all KV heads

  size_t state_size() const {
    return static_cast<size_t>(q_per_kv) * (2 + static_cast<size_t>(head_dim));
  }
  size_t row_bytes(DType dtype) const { return static_cast<size_t>(head_dim) * dtype_bytes(dtype); }
  void cut(const float* q, const KeyValueRows& run, Workspace& work) const;
  void attend(float scale, Stream& stream) const;
};

void RowBatch::State::cut(const float* q, const KeyValueRows& run, Workspace& work) const {
  for (int64_t first = 0; first < run.rows; first += kRowsPerSplit) {
    const size_t skipped = static_cast<size_t>(first) * row_bytes(run.dtype);
    float* state = work.floats.data() + work.pieces.size() * state_size();
    work.states.push_back({state, state + q_per_kv, state + 2 * q_per_kv});
    work.pieces.push_back({q,
                           {run.keys + skipped, run.values + skipped, run.dtype,
                            std::min(kRowsPerSplit, run.rows - first)},
                           work.states.back()});
  }
}

void RowBatch::State::attend(float scale, Stream& stream) const {
  int64_t count = 0;
  for (const KeyValueRows& run : runs) count += (run.rows + kRowsPerSplit - 1) / kRowsPerSplit;
  Workspace& work = Workspace::here();
  work.reserve(heads.size(), static_cast<size_t>(count), state_size());
  work.pieces.clear();
  work.states.clear();
  work.merges.clear();
  for (const RowHead& head : heads) {
    const size_t first = work.states.size();
    for (size_t i = 0; i < head.runs; ++i) cut(head.q, runs[head.first_run + i], work);
    const std::span parts(work.states.data() + first, work.states.size() - first);
    work.merges.push_back({head.out, parts});
  }
  attend_rows(work.pieces, q_per_kv, head_dim, scale, stream);
  merge_states(work.merges, q_per_kv, head_dim);
}

RowBatch::RowBatch() : state_(std::make_unique<State>()) {}
RowBatch::~RowBatch() = default;

void RowBatch::reserve(int q_per_kv, int head_dim, size_t heads, size_t runs, size_t rows) {
  state_->heads.reserve(heads);
  state_->runs.reserve(runs);
  state_->q_per_kv = q_per_kv;
  state_->head_dim = head_dim;
  const size_t pieces = rows / static_cast<size_t>(kRowsPerSplit) + runs;
  Workspace::here().reserve(heads, pieces, state_->state_size());
}

void RowBatch::start(int q_per_kv, int head_dim) {
  state_->q_per_kv = q_per_kv;
  state_->head_dim = head_dim;
  state_->heads.clear();
  state_->runs.clear();
}

void RowBatch::add(const float* q, std::span<const KeyValueRows> runs, float* out) {
  if (q == nullptr || out == nullptr) refuse("RowBatch: a KV head has no query or no output");
  for (const KeyValueRows& run : runs) check_run(run);
  state_->heads.push_back({q, out, state_->runs.size(), runs.size()});
  state_->runs.insert(state_->runs.end(), runs.begin(), runs.end());
}

void RowBatch::attend(float scale, Stream& stream) {
  const State& state = *state_;
  check::attends_on_cpu("RowBatch", stream);
  check::decode_sizes("RowBatch", state.q_per_kv, state.head_dim, scale);
  if (!state.heads.empty()) state.attend(scale, stream);
}

}  // namespace kvlm
