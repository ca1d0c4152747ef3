#include "kernels/cpu/matmul.h"

#include <blis.h>

#include "kernels/cpu/multiplying.h"

namespace kvlm::cpu {

namespace {

thread_local bool multiplying = false;

}  // namespace

bool is_multiplying() noexcept { return multiplying; }

void multiply(Matrix<float> y, Matrix<const float> x, Matrix<const float> w, size_t rows,
              size_t out, size_t in, bool add) {
  // An explicit run-time object keeps the library to this thread, whatever flavour of it is linked
  // and whatever its environment variables say.
  rntm_t runtime = BLIS_RNTM_INITIALIZER;
  bli_rntm_set_num_threads(1, &runtime);
  // The library multiplies without packing whenever one dimension is below a few hundred, as those
  // of a tile are; measured, that pays only for few rows.
  constexpr size_t kMinPackedRows = 48;
  if (rows >= kMinPackedRows) bli_rntm_disable_l3_sup(&runtime);
  float one = 1.0f;
  float beta = add ? 1.0f : 0.0f;
  // The library's interface has no const; it only reads x and w.
  auto* x_data = const_cast<float*>(x.data);
  auto* w_data = const_cast<float*>(w.data);
  const auto stride = [](size_t n) { return static_cast<inc_t>(n); };
  const auto size = [](size_t n) { return static_cast<dim_t>(n); };
  multiplying = true;
  bli_sgemm_ex(BLIS_NO_TRANSPOSE, BLIS_TRANSPOSE, size(rows), size(out), size(in), &one, x_data,
               stride(x.stride), 1, w_data, stride(w.stride), 1, &beta, y.data, stride(y.stride), 1,
               nullptr, &runtime);
  multiplying = false;
}

}  // namespace kvlm::cpu
