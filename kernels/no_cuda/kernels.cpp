// What a build without CUDA links instead of kernels/cuda/: every entry point throws
// Error{kUnsupported}. What a program asks without a GPU, too, is in queue.cpp.
#include <fmt/format.h>

#include <string_view>

#include "kernels/base/error.h"
#include "kernels/base/readback.h"
#include "kernels/base/recording.h"
#include "kernels/cuda/attend/attend_packed.h"
#include "kernels/cuda/attend/slot_weights.h"
#include "kernels/cuda/dense/attention.h"
#include "kernels/cuda/device/fill.h"
#include "kernels/cuda/importance/blend_rows.h"
#include "kernels/cuda/importance/column_sums.h"
#include "kernels/cuda/importance/expected_attention.h"
#include "kernels/cuda/importance/merge_rows.h"
#include "kernels/cuda/importance/row_scores.h"
#include "kernels/cuda/model/activation.h"
#include "kernels/cuda/model/elementwise.h"
#include "kernels/cuda/model/norm.h"
#include "kernels/cuda/model/qkv.h"
#include "kernels/cuda/model/rope.h"
#include "kernels/cuda/model/sample.h"
#include "kernels/cuda/model/tile_rows.h"
#include "kernels/cuda/pack/byte_values.h"
#include "kernels/cuda/pack/hadamard.h"
#include "kernels/cuda/pack/key_basis.h"
#include "kernels/cuda/pack/pack.h"
#include "kernels/cuda/product/gemm.h"
#include "kernels/cuda/product/quantized.h"
#include "kernels/cuda/table/row_moves.h"
#include "kernels/cuda/table/store_rows.h"
#include "kernels/decode_table.h"

namespace kvlm::cuda {

namespace {

/// What every CUDA entry point of a build without CUDA does.
[[noreturn]] void refuse(std::string_view op) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("{}: this build has no CUDA backend; use --device cpu, or build with "
                          "-DKVLM_CUDA=ON",
                          op));
}

}  // namespace

void activate(TensorView, ConstTensorView, Activation, Stream&) { refuse("activate"); }

void activate_gate(TensorView, ConstTensorView, ConstTensorView, Activation, Stream&) {
  refuse("activate_gate");
}

void unpack_blocks(const PackedFormat&, std::span<const PackedBlock>, float*, Stream&) {
  refuse("unpack_blocks");
}

void attention(TensorView, ConstTensorView, ConstTensorView, ConstTensorView,
               std::span<const KeyValueRows>, bool, float, DType, Stream&) {
  refuse("attention");
}

void segment_attention(TensorView, ConstTensorView, ConstTensorView, ConstTensorView,
                       const Segments&, float, DType, Stream&) {
  refuse("segment_attention");
}

void segment_attention(TensorView, ConstTensorView, const Segments&, float, Stream&) {
  refuse("segment_attention");
}

void blend_rows(TensorView, ConstTensorView, const RowBlend&, Stream&) { refuse("blend_rows"); }

void place_bytes(TensorView, ConstTensorView, ConstTensorView, Stream&) { refuse("place_bytes"); }

void column_sums(const QueuedSums&, ConstTensorView, ConstTensorView, std::span<const KeyValueRows>,
                 SummedRows, float, DType, Stream&) {
  refuse("column_sums");
}

void attend_and_sum(const QueuedSums&, TensorView, ConstTensorView, ConstTensorView,
                    ConstTensorView, std::span<const KeyValueRows>, float, DType, Stream&) {
  refuse("attend_and_sum");
}

void mean_over_heads(const double*, int64_t, int64_t, int64_t, double*, Stream&) {
  refuse("mean_over_heads");
}

void gather_rows(TensorView, ConstTensorView, std::span<const int32_t>, Stream&) {
  refuse("gather_rows");
}

void gather_rows(TensorView, const QuantizedMatrix&, std::span<const int32_t>, Stream&) {
  refuse("gather_rows");
}

void add(TensorView, ConstTensorView, Stream&) { refuse("add"); }

void add_scaled(TensorView, ConstTensorView, ConstTensorView, Stream&) { refuse("add_scaled"); }

void convert(TensorView, ConstTensorView, Stream&) { refuse("convert"); }

void expected_attention(const FutureQueries&, ConstTensorView, std::span<const StoredRows>,
                        std::span<double>, Stream&) {
  refuse("expected_attention");
}

void fill_random(TensorView, uint64_t, float, Stream&) { refuse("fill_random"); }

void linear(TensorView, ConstTensorView, const Weight&, ConstTensorView, bool, Stream&) {
  refuse("linear");
}

void linear(TensorView, ConstTensorView, const Weight&, const LinearTail&, Stream&) {
  refuse("linear");
}

void linears(std::span<const Projection>, ConstTensorView, Stream&) { refuse("linears"); }

DType operand_dtype(const Weight&, int64_t) { refuse("operand_dtype"); }

void gated_linears(TensorView, const Projection&, const Projection&, Activation, ConstTensorView,
                   Stream&) {
  refuse("gated_linears");
}

bool gates_alone(const Projection&, const Projection&, Activation, DType, int64_t) {
  refuse("gated_linears");
}

double measure_matrix_rate(int, DType, Stream&) { refuse("measure_matrix_rate"); }

void hadamard(std::span<const HadamardRows>, Stream&) { refuse("hadamard"); }

void change_basis(const KeyBasis&, BasisChange, std::span<const BasisJob>, Stream&) {
  refuse("change_basis");
}

void prepare_basis(const KeyBasis&, int) { refuse("prepare_basis"); }

void channel_ends(std::span<const float* const>, int, int, std::span<float>, std::span<float>,
                  Stream&) {
  refuse("channel_ends");
}

void merge_rows(MergeRule, const RowMerge&, Stream&) { refuse("merge_rows"); }

void rms_norm(TensorView, ConstTensorView, ConstTensorView, float, Stream&) { refuse("rms_norm"); }

void layer_norm(TensorView, ConstTensorView, ConstTensorView, ConstTensorView, float, Stream&) {
  refuse("layer_norm");
}

void add_norm(TensorView, TensorView, Residual, std::span<const Addend>, ConstTensorView,
              ConstTensorView, float, Stream&) {
  refuse("add_norm");
}

void pack(const PackedFormat&, const std::array<PackRule, 2>&, std::span<const PackJob>, DType,
          Stream&) {
  refuse("pack");
}

void norm_queries_and_keys(TensorView, ConstTensorView, ConstTensorView, float, Stream&) {
  refuse("norm_queries_and_keys");
}

void rotate_queries_and_keys(TensorView, ConstTensorView, ConstTensorView, Stream&) {
  refuse("rotate_queries_and_keys");
}

void rotate(std::span<const TensorView>, ConstTensorView, ConstTensorView, Stream&) {
  refuse("rotate");
}

void widen_rows(std::span<const std::byte* const>, DType, int, float*, Stream&) {
  refuse("widen_rows");
}

void gather_listed(std::span<const ListedRows>, DType, int, DType, Stream&) {
  refuse("gather_listed");
}

void copy_ranges(std::span<const ByteRange>, Stream&) { refuse("copy_ranges"); }

void narrow_rows(std::span<std::byte* const>, DType, int, const float*, Stream&) {
  refuse("narrow_rows");
}

void close_gaps(std::span<const RowGap>, Stream&) { refuse("close_gaps"); }

void turn_rows(std::span<const TurnedRow>, DType, std::span<const double>, Stream&) {
  refuse("turn_rows");
}

void row_norms(std::span<const StoredRows>, int, std::span<double>, Stream&) {
  refuse("row_norms");
}

void cosines_to_mean(std::span<const StoredRows>, int, std::span<double>, Stream&) {
  refuse("cosines_to_mean");
}

void sample_rows(std::span<int32_t>, TensorView, std::span<const RowSampling>, Stream&) {
  refuse("sample_rows");
}

void mean_arrays(std::span<const float* const>, std::span<const MeanJob>, Stream&) {
  refuse("mean_arrays");
}

void store_rows(std::span<const RowDestination>, DType, ConstTensorView, Stream&) {
  refuse("store_rows");
}

void scatter_tiles(TensorView, ConstTensorView, ConstTensorView, ConstTensorView, Stream&) {
  refuse("scatter_tiles");
}

void take_tiles(TensorView, int64_t, ConstTensorView, int64_t, int64_t, Stream&) {
  refuse("take_tiles");
}

}  // namespace kvlm::cuda

namespace kvlm {

struct BasisBatch::State {};
BasisBatch::BasisBatch(Device) { cuda::refuse("BasisBatch"); }
BasisBatch::~BasisBatch() = default;
BasisBatch::BasisBatch(BasisBatch&&) noexcept = default;
void BasisBatch::describe(const KeyBasis&, BasisChange, std::span<const BasisJob>, const float*,
                          Stream&) {
  cuda::refuse("BasisBatch");
}
void BasisBatch::run(const float*, Stream&) { cuda::refuse("BasisBatch"); }

struct DecodeTable::State {};
DecodeTable::DecodeTable(const TableShape&, std::span<const std::array<RowWindow, 2>>, Device) {
  cuda::refuse("DecodeTable");
}
DecodeTable::~DecodeTable() = default;
bool DecodeTable::holds(const TableLoad&) const noexcept { return true; }
void DecodeTable::reserve(const TableLoad&) {}
void DecodeTable::set(int, int, std::span<const TableHead>, Stream&) {
  cuda::refuse("DecodeTable::set");
}
int DecodeTable::drafts() const noexcept { return 0; }
void DecodeTable::await_drafts(size_t) const {}
void DecodeTable::lay(int, int, int, std::span<const TableHead>) {
  cuda::refuse("DecodeTable::lay");
}
void DecodeTable::send(int, Stream&) { cuda::refuse("DecodeTable::send"); }
void DecodeTable::start(std::span<const TableRow>, Stream&) { cuda::refuse("DecodeTable::start"); }
void DecodeTable::store(int, const float*, const float*, Stream&) {
  cuda::refuse("DecodeTable::store");
}
void DecodeTable::attend(int, const float*, float*, float, Stream&) {
  cuda::refuse("DecodeTable::attend");
}
void DecodeTable::pack(bool, Stream&) { cuda::refuse("DecodeTable::pack"); }
void DecodeTable::evict(std::span<const int>, Stream&) { cuda::refuse("DecodeTable::evict"); }
void DecodeTable::drop_least(Stream&) { cuda::refuse("DecodeTable::drop_least"); }
std::vector<int> DecodeTable::came(int) const { return {}; }
void DecodeTable::read_placed(int, int, int, PlacedCopy&) const {}
std::vector<int64_t> DecodeTable::gained_bytes() const { return {}; }
void DecodeTable::put_weights(std::span<const float>, float*) const {}
uint64_t DecodeTable::version() const noexcept { return 0; }

bool DecodeTable::attends_in_place(int) const noexcept { return false; }
int64_t DecodeTable::guarded_remaps(int) const { return 0; }

struct Recording::State {};

Recording::Recording() = default;
Recording::~Recording() = default;

bool Recording::make(Stream&, const std::function<void()>&) { cuda::refuse("Recording"); }
bool Recording::fits(Stream&) const noexcept { return false; }
void Recording::run(Stream&) { cuda::refuse("Recording"); }
void Recording::clear() noexcept {}

struct Readback::State {};
Readback::Readback() = default;
Readback::~Readback() = default;
Readback::Readback(Readback&&) noexcept = default;
Readback& Readback::operator=(Readback&&) noexcept = default;
void Readback::start(const void*, size_t, Stream&) { cuda::refuse("Readback"); }
const std::byte* Readback::wait() const { cuda::refuse("Readback"); }

}  // namespace kvlm
