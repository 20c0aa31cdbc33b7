// Optimizer updates: each tensor is read and written once, and the 16-bit copy of a weight is written while the
// new weight is still in the cache.
#pragma once
#include <cmath>

#include "masters.h"

// See `tables.StepTable`. Rows of addresses: gradients, parameters, states, four of `Coding`, beside and checksums (see
// `Weight`).
struct StepTable {
  const int64_t *numel, *addresses, *grad_dtypes, *param_dtypes, *beside_dtypes, *state_dtypes, *group_of;
};

// Calls `update(tensor, gradient, weights, state, roots, n)` for each block; `state(i)` is null for a tensor without that
// one. `roots`: null, or where those of second moments are put, by which these are coded.
// The first `moments` states may be coded: `rounding(tensor)` says how. A skipped step still casts float32 weights:
// afterwards the copy equals them, whatever it held before.
template <typename Rounds, typename Update>
void update_blocks(int64_t tensors, const StepTable& table, int states, int moments, bool skip, int threads,
                   Rounds rounding, Update update) {
  const auto place = [&](int row, int64_t t) { return table.addresses[row * tensors + t]; };
  std::vector<int64_t> numel;
  for (int64_t t = 0; t < tensors; ++t) numel.push_back(Rows8(place(3 + states, t), table.numel[t]).numel);
  for_each_chunk(chunks_of(tensors, numel.data()), threads, [&](const Chunk& c, int64_t) {
    const int64_t t = c.tensor;
    const auto at = [&](int row) { return place(row, t); };
    const Coding coding{table.state_dtypes[t], at(2 + states), at(3 + states), at(4 + states), at(5 + states)};
    const Weight w{at(1), table.param_dtypes[t], at(6 + states), table.beside_dtypes[t], at(7 + states)};
    const Rows8 rows(coding.row, table.numel[t]);
    const int64_t codes[2] = {at(2), at(3)};
    const bool coded = coding.dtype && codes[0] && !skip, random = coded || (w.dtype && w.beside_dtype == kRemainder8);
    float block[kBlock], decoded[3][kBlock];
    uint32_t words[kBlock];
    for (int64_t begin = c.begin; begin < c.end && !(skip && w.dtype); begin += kBlock) {
      const int64_t offset = rows.offset(begin), span = begin / kSpan, n = rows.count(begin);
      float* const weights = read_weights(w, offset, span, n, block);
      if (coded) decode_states(coding, codes, moments, span, offset, n, decoded);
      const auto state = [&](int i) {
        float* const wide = at(2 + i) ? coding.dtype ? decoded[i] : pointer<float>(at(2 + i), offset) : nullptr;
        if (wide && !coding.dtype) fetch_ahead(wide);
        return wide;
      };
      if (!skip) with_dtype(table.grad_dtypes[t], [&](auto type) {
        update(t, pointer<decltype(type)>(at(0), offset), weights, state, coded ? decoded[2] : nullptr, n);
      });
      if (random) rounding(t).words(uint64_t(coding.first + offset), n, words);
      if (coded) encode_states(coding, rounding(t), words, codes, moments, span, offset, n, decoded);
      write_weights(w, offset, span, n, weights, words);
    }
  });
}

struct AdamGroup { double lr, beta1, beta2, epsilon, weight_decay, decoupled, maximize; };

// As torch's lerp: exact at both ends.
inline float lerp(float from, float to, float weight) {
  return weight < 0.5f ? multiply_add(weight, to - from, from) : multiply_add(weight - 1, to - from, to);
}

struct AdamScalars {
  float multiplier, l2, keep, beta2, new_mean, new_square, step_size, root_correction, epsilon;

  AdamScalars(const AdamGroup& h, double step, float multiplier)
      : multiplier(h.maximize ? -multiplier : multiplier),
        l2(float(h.decoupled ? 0 : h.weight_decay)),
        keep(float(h.decoupled ? 1 - h.lr * h.weight_decay : 1)),
        beta2(float(h.beta2)),
        new_mean(float(1 - h.beta1)),
        new_square(float(1 - h.beta2)),
        step_size(float(h.lr / (1 - std::pow(h.beta1, step)))),
        root_correction(float(std::sqrt(1 - std::pow(h.beta2, step)))),
        epsilon(float(h.epsilon)) {}
};

template <bool amsgrad, bool coded, typename G>
void adam_block(const AdamScalars& h, const G* __restrict g, float* __restrict p, float* __restrict m,
                float* __restrict v, float* __restrict peak, float* __restrict roots, int64_t n) {
  fetch_ahead(g);
  for (int64_t i = 0; i < n; ++i) {
    float grad = widen(g[i]) * h.multiplier;
    if (h.l2 != 0) grad = multiply_add(h.l2, p[i], grad);
    m[i] = lerp(m[i], grad, h.new_mean);
    v[i] = multiply_add(h.new_square * grad, grad, h.beta2 * v[i]);
    float square = v[i];
    if (amsgrad) square = peak[i] = v[i] > peak[i] || v[i] != v[i] ? v[i] : peak[i];  // NaN stays, as in torch
    const float root = std::sqrt(square);
    if (coded) roots[i] = root;
    p[i] = p[i] * h.keep - h.step_size * m[i] / (root / h.root_correction + h.epsilon);
  }
}

struct SgdGroup { double lr, momentum, dampening, nesterov, weight_decay, maximize; };

struct SgdScalars {
  float multiplier, l2, momentum, new_buffer, lr;
  bool nesterov;

  SgdScalars(const SgdGroup& h, float multiplier)
      : multiplier(h.maximize ? -multiplier : multiplier),
        l2(float(h.weight_decay)),
        momentum(float(h.momentum)),
        new_buffer(float(1 - h.dampening)),
        lr(float(h.lr)),
        nesterov(h.nesterov != 0) {}
};

template <bool momentum, typename G>
void sgd_block(const SgdScalars& h, const G* __restrict g, float* __restrict p, float* __restrict buffer, int64_t n) {
  fetch_ahead(g);
  for (int64_t i = 0; i < n; ++i) {
    float grad = widen(g[i]) * h.multiplier;
    if (h.l2 != 0) grad = multiply_add(h.l2, p[i], grad);
    if (momentum) {
      buffer[i] = multiply_add(h.new_buffer, grad, h.momentum * buffer[i]);
      grad = h.nesterov ? multiply_add(h.momentum, buffer[i], grad) : buffer[i];
    }
    p[i] = multiply_add(-h.lr, grad, p[i]);
  }
}
