#include "kernels/attend_packed.h"

#include <bit>
#include <string_view>
#include <utility>

#include "kernels/check.h"
#include "kernels/cpu/attend_packed.h"
#include "kernels/cuda/attend/attend_packed.h"

// Argument checks of attend_packed() and unpack_blocks(). The work is in cpu/attend_packed.cpp, and
// for unpack_blocks() on a GPU in cuda/attend/.
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

/// Checks all blocks; returns their live rows.
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

/// The same for blocks at even strides, of which only the first and the last are read.
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

void check_segment(std::string_view op, const SlotSegment& segment) {
  if (segment.slots < 0)
    refuse("{}: a segment of {} slots; expected at least 0", op, segment.slots);
  if (segment.format != nullptr) {
    check_format(op, *segment.format);
    const int64_t live_rows = segment.code_stride == 0
                                  ? check_blocks(op, *segment.format, segment.blocks)
                                  : check_even_blocks(op, *segment.format, segment.blocks);
    if (live_rows != segment.slots) {
      refuse("{}: the blocks of a segment hold {} tokens, expected {}", op, live_rows,
             segment.slots);
    }
    return;
  }
  if (!check::is_floating(segment.dtype)) {
    refuse("{}: a segment of unquantized tokens holds {}, expected f32, f16 or bf16", op,
           dtype_name(segment.dtype));
  }
  if (segment.slots > 0 && segment.rows == nullptr) {
    refuse("{}: a segment of {} slots has no data", op, segment.slots);
  }
}

void check_keys(std::string_view op, const PackedHead& head, int head_dim) {
  int64_t slots = 0;
  for (const SlotSegment& segment : head.keys) {
    check_segment(op, segment);
    slots += segment.slots;
    if (segment.selection != nullptr) refuse("{}: keys may not be selected", op);
    if (segment.format == nullptr) continue;
    if (segment.q == nullptr && segment.format->channels() != head_dim) {
      refuse(
          "{}: packed keys have {} channels, but the query has {}; give the segment its own query",
          op, segment.format->channels(), head_dim);
    }
  }
  if (slots != head.slots) {
    refuse("{}: the keys hold {} slots, the KV head {}", op, slots, head.slots);
  }
}

/// Checks that a segment has as many slots as its selection marks.
void check_selection(std::string_view op, const SlotSegment& segment) {
  const int64_t ones = set_bits(segment.selection, segment.selected_of);
  if (segment.slots != (segment.selected_bit ? ones : segment.selected_of - ones)) {
    refuse("{}: a segment of {} slots selects {} of {} with bit {}", op, segment.slots, ones,
           segment.selected_of, segment.selected_bit);
  }
}

void check_values(std::string_view op, const PackedHead& head, int head_dim) {
  int64_t slots = 0;
  int64_t selected = 0;
  for (const SlotSegment& segment : head.values) {
    check_segment(op, segment);
    if (segment.format != nullptr && segment.format->channels() != head_dim) {
      refuse("{}: values of {} channels, expected head_dim {}", op, segment.format->channels(),
             head_dim);
    }
    if (segment.selection == nullptr) {
      if (selected != 0) refuse("{}: a selection of values does not end", op);
      slots += segment.slots;
      continue;
    }
    check_selection(op, segment);
    selected += segment.slots;
    if (!segment.selection_ends) continue;
    if (selected != segment.selected_of) {
      refuse("{}: the segments of a selection hold {} of {} slots", op, selected,
             segment.selected_of);
    }
    slots += std::exchange(selected, 0);
  }
  if (slots != head.slots || selected != 0) {
    refuse("{}: the values hold {} slots, the KV head {}", op, slots, head.slots);
  }
}

void check_head(std::string_view op, const PackedHead& head, int head_dim) {
  if (head.slots < 0 || head.out == nullptr ||
      (head.slots > 0 && (head.q == nullptr || head.weights == nullptr))) {
    refuse("{}: a KV head with {} slots has no query, weights or output", op, head.slots);
  }
  check_keys(op, head, head_dim);
  check_values(op, head, head_dim);
  for (const ScoreRemap& remap : head.remaps) {
    if (remap.first < 0 || remap.slots < 0 || remap.first > head.slots - remap.slots) {
      refuse("{}: a remap of {} slots from {} on, in a KV head with {}", op, remap.slots,
             remap.first, head.slots);
    }
  }
}

}  // namespace

void attend_packed(std::span<PackedHead> heads, int q_per_kv, int head_dim, float scale,
                   Stream& stream) {
  constexpr std::string_view kOp = "attend_packed";
  check::attends_on_cpu(kOp, stream);
  check::decode_sizes(kOp, q_per_kv, head_dim, scale);
  for (const PackedHead& head : heads) check_head(kOp, head, head_dim);
  cpu::attend_packed(heads, q_per_kv, head_dim, scale, stream);
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
