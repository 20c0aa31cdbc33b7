// What Python calls (see native.py), without its lock: no exception may leave, so each returns 0, or 1 if memory is short.
// Tables hold one row of addresses per kind of tensor; 0 stands for "none".
#include <exception>
#include <optional>

#include "attention.h"
#include "check_grads.h"
#include "optimizers.h"

namespace {
template <typename Kernel> int status_of(Kernel kernel) noexcept {
  try {
    kernel();
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
}  // namespace

extern "C" {

// See `check_grads.check_grads`. result: found_inf, multiplier, norm, digest.
int check_grads(int64_t tensors, const GradTable* grads, const float* scale, const float* multiplier,
                const double* max_norm, float* result, int threads) { return status_of([&] {
  const float inverse = scale ? float(1 / double(*scale)) : 1;
  const float factor = multiplier ? *multiplier * inverse : inverse;
  const Sums sums = sums_of(tensors, *grads, factor, threads);
  const float norm = float(std::sqrt(sums.squares));
  const float shrink = max_norm ? float(*max_norm / (double(norm) + 1e-6)) : 1;
  result[0] = !std::isfinite(sums.squares) || inverse == 0;
  result[1] = factor * (shrink > 1 ? 1 : shrink);  // NaN stays NaN
  result[2] = norm;
  result[3] = float(sums.digest);
}); }

// See `update_scale.update_scale_`. settings: growth and backoff factor, interval, least and largest scale.
int update_scale(int64_t flags, float* scale, int32_t* tracker, int32_t* skips, const int64_t* found_infs,
                 const double* settings, int) { return status_of([&] {
  bool found = false;
  for (int64_t i = 0; i < flags; ++i) found |= *pointer<float>(found_infs[i], 0) != 0;
  const int32_t good = found ? 0 : int32_t(uint32_t(*tracker) + 1);
  const bool grows = !found && double(good) == settings[2];
  const float next = float(double(*scale) * settings[found ? 1 : 0]);
  if (found || (grows && std::isfinite(next))) *scale = next;
  *tracker = grows ? 0 : good;
  *skips = found ? *skips + 1 : 0;
  *scale = *scale < settings[3] ? float(settings[3]) : *scale > settings[4] ? float(settings[4]) : *scale;  // NaN stays
}); }

// See `unscale.unscale_`.
int unscale(int64_t tensors, const GradTable* grads, const float* multiplier, float* found_inf, int threads) {
  return status_of([&] {
    if (scale_in_place(tensors, *grads, *multiplier, threads) || *multiplier == 0) *found_inf = 1;
  });
}

// See `adam.adam_`. States: exp_avg, exp_avg_sq, max_exp_avg_sq, step.
int adam(int64_t tensors, const StepTable* table, const AdamGroup* groups, const float* multiplier,
         const float* found_inf, int threads) { return status_of([&] {
  const bool skip = found_inf && *found_inf != 0;
  const int64_t *const steps = table->addresses + 5 * tensors, *const keys = table->addresses + 9 * tensors;
  std::vector<AdamScalars> scalars;
  std::vector<Rounding> roundings;
  for (int64_t t = 0; t < tensors && !skip; ++t) {
    const AdamGroup& group = groups[table->group_of[t]];
    const float step = *pointer<float>(steps[t], 0) += 1;
    scalars.emplace_back(group, step, multiplier ? *multiplier : 1);
    roundings.emplace_back(keys[t], step, group.beta1);
  }
  const auto rounding = [&](int64_t t) { return roundings[t]; };
  update_blocks(tensors, *table, 4, 2, skip, threads, rounding,
                [&](int64_t t, auto* g, float* p, auto state, float* roots, int64_t n) {
    if (roots) adam_block<false, true>(scalars[t], g, p, state(0), state(1), nullptr, roots, n);
    else if (float* const peak = state(2)) adam_block<true, false>(scalars[t], g, p, state(0), state(1), peak, roots, n);
    else adam_block<false, false>(scalars[t], g, p, state(0), state(1), nullptr, roots, n);
  });
}); }

// See `sgd.sgd_`. States: momentum_buffer and, where something is coded or kept, step.
int sgd(int64_t tensors, const StepTable* table, const SgdGroup* groups, const float* multiplier,
        const float* found_inf, int threads) { return status_of([&] {
  const bool skip = found_inf && *found_inf != 0;
  const int64_t *const steps = table->addresses + 3 * tensors, *const keys = table->addresses + 7 * tensors;
  for (int64_t t = 0; t < tensors && !skip; ++t)
    if (steps[t]) *pointer<float>(steps[t], 0) += 1;
  const auto rounding = [&](int64_t t) {
    return Rounding(keys[t], *pointer<float>(steps[t], 0), groups[table->group_of[t]].momentum);
  };
  update_blocks(tensors, *table, 2, 1, skip, threads, rounding,
                [&](int64_t t, auto* g, float* p, auto state, float*, int64_t n) {
    const SgdScalars scalars(groups[table->group_of[t]], multiplier ? *multiplier : 1);
    if (float* const buffer = state(0)) sgd_block<true>(scalars, g, p, buffer, n);
    else sgd_block<false>(scalars, g, p, nullptr, n);
  });
}); }

// Whether `attention_backward` is made for this processor.
int attention_available() { return AMPCOMPILE_BFLOAT16; }

#if AMPCOMPILE_BFLOAT16
// See `attention_backward.attention_backward`. sizes: heads, queries, keys, features, causal. addresses and strides
// (batch, head, row, column): query, key, value, grad_out, out, three gradients, logsumexp, mask.
int attention_backward(int64_t batch_times_heads, const int64_t* sizes, const int64_t* addresses, const int64_t* strides,
                       const int64_t* mask_dtype, const float* scale, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    std::optional<HeadBackward> backward;  // whose constructor takes all memory
    failed = status_of([&] { backward.emplace(sizes[1], sizes[2], sizes[3], sizes[4] != 0, *scale); });
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < batch_times_heads; ++i) {
      if (!backward) continue;
      const auto stride = [&](int t, int dim) { return strides[4 * t + dim]; };
      const auto offset = [&](int t) { return i / sizes[0] * stride(t, 0) + i % sizes[0] * stride(t, 1); };
      const auto rows = [&](int t) { return Rows{pointer<BFloat16>(addresses[t], offset(t)), stride(t, 2)}; };
      const Mask mask{addresses[9], *mask_dtype, offset(9), stride(9, 2), stride(9, 3)};
      backward->run({rows(0), rows(1), rows(2), rows(3), rows(4), rows(5), rows(6), rows(7),
                     pointer<float>(addresses[8], offset(8)), stride(8, 2), mask});
    }
  }
  return failed;
}
#endif
}
