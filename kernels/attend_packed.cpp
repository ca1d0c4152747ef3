#include "kernels/attend_packed.h"

#include <bit>
#include <string_view>
#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/attend_packed.h"
#include "kernels/cuda/attend/attend_packed.h"

// Checks the lanes of attend_packed() against their formats and sizes, then hands them to the CPU's
// implementation.
namespace kvlm {

namespace {

using check::refuse;

/// Set bits among the first `count` of `words`.
int64_t set_bits(const uint64_t* words, int count) {
  int64_t sum = 0;
  int bit = 0;
  for (; bit + 64 <= count; bit += 64) sum += std::popcount(words[bit / 64]);
  if (bit < count) sum += std::popcount(words[bit / 64] << (64 - (count - bit)));
  return sum;
}

void check_format(std::string_view op, const PackedFormat& format) {
  if (format.sections < 1 || format.sections > 2 ||
      (format.sections == 2 && format.axis != ScaleAxis::kChannel)) {
    refuse("{}: a format of {} sections; expected one, or two with a scale per channel", op,
           format.sections);
  }
  for (int i = 0; i < format.sections; ++i) {
    const PackedSection& section = format.section[static_cast<size_t>(i)];
    if (section.channels < 1 || !is_code(section.code)) {
      refuse(
          "{}: section {} has {} channels and code format {}; expected at least one channel and a "
          "known format",
          op, i, section.channels, static_cast<int>(section.code));
    }
  }
  if (format.axis == ScaleAxis::kToken && format.group_size < 1) {
    refuse("{}: scales per token with groups of {} channels", op, format.group_size);
  }
  if (format.meta != DType::kF16 && format.meta != DType::kF32) {
    refuse("{}: scales of type {}, expected f16 or f32", op, dtype_name(format.meta));
  }
}

/// Returns the live rows of all blocks.
int64_t check_blocks(std::string_view op, const PackedFormat& format,
                     std::span<const PackedBlock> blocks) {
  const bool stores_zeros =
      format.section[0].zero_stored || (format.sections == 2 && format.section[1].zero_stored);
  int64_t live_rows = 0;
  for (const PackedBlock& block : blocks) {
    const int64_t live = block.live != nullptr ? set_bits(block.live, block.rows) : block.rows;
    if (block.rows < 0 || block.live_rows != live) {
      refuse("{}: a block of {} rows claims {} tokens, but {} are marked", op, block.rows,
             block.live_rows, live);
    }
    if (block.rows > 0 && (block.codes == nullptr || block.scales == nullptr ||
                           (stores_zeros && block.zeros == nullptr))) {
      refuse("{}: a block of {} rows has no codes, scales or zero points", op, block.rows);
    }
    live_rows += live;
  }
  return live_rows;
}

/// The same of blocks that lie evenly, of which the first and the last tell all.
int64_t check_even_blocks(std::string_view op, const PackedFormat& format,
                          std::span<const PackedBlock> blocks) {
  if (blocks.size() < 2) return check_blocks(op, format, blocks);
  if (blocks.back().rows > blocks.front().rows) {
    refuse(
        "{}: evenly spaced blocks begin with {} rows and end with {}; the last may not be larger",
        op, blocks.front().rows, blocks.back().rows);
  }
  const int64_t first = check_blocks(op, format, blocks.first(1));
  const int64_t last = check_blocks(op, format, blocks.last(1));
  return static_cast<int64_t>(blocks.size() - 1) * first + last;
}

void check_run(std::string_view op, const SlotRun& run) {
  if (run.slots < 0) refuse("{}: a segment of {} slots; expected at least 0", op, run.slots);
  if (run.format != nullptr) {
    check_format(op, *run.format);
    const int64_t live_rows = run.code_stride == 0 ? check_blocks(op, *run.format, run.blocks)
                                                   : check_even_blocks(op, *run.format, run.blocks);
    if (live_rows != run.slots) {
      refuse("{}: the blocks of a segment hold {} tokens, expected {}", op, live_rows, run.slots);
    }
    return;
  }
  if (!check::is_floating(run.dtype)) {
    refuse("{}: a segment of unquantized tokens holds {}, expected f32, f16 or bf16", op,
           dtype_name(run.dtype));
  }
  if (run.slots > 0 && run.rows == nullptr) {
    refuse("{}: a segment of {} slots has no data", op, run.slots);
  }
}

void check_keys(std::string_view op, const PackedLane& lane, int head_dim) {
  int64_t slots = 0;
  for (const SlotRun& run : lane.keys) {
    check_run(op, run);
    slots += run.slots;
    if (run.selection != nullptr) refuse("{}: keys may not be selected", op);
    if (run.format == nullptr) continue;
    if (run.q == nullptr && run.format->channels() != head_dim) {
      refuse(
          "{}: packed keys have {} channels, but the query has {}; give the segment its own query",
          op, run.format->channels(), head_dim);
    }
  }
  if (slots != lane.slots) {
    refuse("{}: the keys hold {} slots, the KV head {}", op, slots, lane.slots);
  }
}

/// A run has the slots that its selection marks.
void check_selection(std::string_view op, const SlotRun& run) {
  const int64_t ones = set_bits(run.selection, run.selected_of);
  if (run.slots != (run.selected_bit ? ones : run.selected_of - ones)) {
    refuse("{}: a segment of {} slots selects {} of {} with bit {}", op, run.slots, ones,
           run.selected_of, run.selected_bit);
  }
}

void check_values(std::string_view op, const PackedLane& lane, int head_dim) {
  int64_t slots = 0;
  int64_t selected = 0;
  for (const SlotRun& run : lane.values) {
    check_run(op, run);
    if (run.format != nullptr && run.format->channels() != head_dim) {
      refuse("{}: values of {} channels, expected head_dim {}", op, run.format->channels(),
             head_dim);
    }
    if (run.selection == nullptr) {
      if (selected != 0) refuse("{}: a selection of values does not end", op);
      slots += run.slots;
      continue;
    }
    check_selection(op, run);
    selected += run.slots;
    if (!run.selection_ends) continue;
    if (selected != run.selected_of) {
      refuse("{}: the segments of a selection hold {} of {} slots", op, selected, run.selected_of);
    }
    slots += std::exchange(selected, 0);
  }
  if (slots != lane.slots || selected != 0) {
    refuse("{}: the values hold {} slots, the KV head {}", op, slots, lane.slots);
  }
}

void check_lane(std::string_view op, const PackedLane& lane, int head_dim) {
  if (lane.slots < 0 || lane.out == nullptr ||
      (lane.slots > 0 && (lane.q == nullptr || lane.weights == nullptr))) {
    refuse("{}: a KV head with {} slots has no query, weights or output", op, lane.slots);
  }
  check_keys(op, lane, head_dim);
  check_values(op, lane, head_dim);
  for (const ScoreRemap& remap : lane.remaps) {
    if (remap.first < 0 || remap.slots < 0 || remap.first > lane.slots - remap.slots) {
      refuse("{}: a remap of {} slots from {} on, in a KV head with {}", op, remap.slots,
             remap.first, lane.slots);
    }
  }
}

}  // namespace

void attend_packed(std::span<PackedLane> lanes, int q_per_kv, int head_dim, float scale,
                   Stream& stream) {
  constexpr std::string_view kOp = "attend_packed";
  check::attends_on_cpu(kOp, stream);
  check::decode_sizes(kOp, q_per_kv, head_dim, scale);
  for (const PackedLane& lane : lanes) check_lane(kOp, lane, head_dim);
  cpu::attend_packed(lanes, q_per_kv, head_dim, scale, stream);
}

void unpack_blocks(const PackedFormat& format, std::span<const PackedBlock> blocks, float* out,
                   Stream& stream) {
  constexpr std::string_view kOp = "unpack_blocks";
  check_format(kOp, format);
  const int64_t rows = check_blocks(kOp, format, blocks);
  if (rows > 0 && out == nullptr) refuse("{}: {} rows have no destination", kOp, rows);
  if (check::on_gpu(stream)) return cuda::unpack_blocks(format, blocks, out, stream);
  cpu::unpack_blocks(format, blocks, out, stream);
}

}  // namespace kvlm
