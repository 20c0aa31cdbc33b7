// The backward of attention in bfloat16. A thread takes one head after another.
//
// Scores and their gradients are float32, rounded only as operands, as in torch's flash kernel. They are computed
// transposed, keys by queries: so operands of products lie in memory the way that the instruction wants them.
#pragma once
#include "bfloat16.h"

#if AMPCOMPILE_BFLOAT16
struct Mask {  // added to scores; null without one
  int64_t address, dtype, offset, query_stride, key_stride;
};

struct Head { Rows q, k, v, grad, out, dq, dk, dv; const float* logsumexp; int64_t logsumexp_stride; Mask mask; };

// With what a thread needs for heads of the same sizes; 16 divides the features.
class HeadBackward {
 public:
  HeadBackward(int64_t queries, int64_t keys, int64_t features, bool causal, float scale)
      : l(queries), s(keys), d(features), lp((l + 15) / 16 * 16), causal(causal), scale(scale), query_pairs(lp / 2 * d),
        grad_pairs(lp / 2 * d), query_columns(d / 2 * lp), grad_columns(d / 2 * lp), key_pairs((s + 1) / 2 * d),
        scores(kTile), score_grads(kTile), added(kTile), p(kTile / 2), g(kTile / 2), g_pairs(kTile / 2), dq(lp * d),
        dk(kKeys * d), dv(kKeys * d), logsumexp(lp), means(lp) {}

  void run(const Head& h) {
    pair_rows(h.q, l, d, query_pairs.data());
    pair_rows(h.grad, l, d, grad_pairs.data());
    pair_rows(h.k, s, d, key_pairs.data());
    transpose_pairs(h.q, l, d, query_columns.data(), lp);
    transpose_pairs(h.grad, l, d, grad_columns.data(), lp);
    for (int64_t i = 0; i < l; ++i) {
      logsumexp[i] = h.logsumexp[i * h.logsumexp_stride];
      means[i] = dot(h.grad.row(i), h.out.row(i), d);
    }
    std::fill(dq.begin(), dq.end(), 0.f);
    for (int64_t key = 0; key < s; key += kKeys) {
      const int64_t keys = std::min(kKeys, s - key);
      std::fill(dk.begin(), dk.end(), 0.f);
      std::fill(dv.begin(), dv.end(), 0.f);
      for (int64_t query = causal ? key : 0; query < lp; query += kQueries)  // no query sees a later key
        tile(h, key, keys, query, std::min(kQueries, lp - query));
      round_rows(dk.data(), keys, d, h.dk.below(key));
      round_rows(dv.data(), keys, d, h.dv.below(key));
    }
    round_rows(dq.data(), l, d, h.dq);
  }

 private:
  static constexpr int64_t kQueries = 128, kKeys = 64, kTile = kQueries * kKeys;

  int64_t l, s, d, lp;  // queries, keys, features; queries padded
  bool causal;
  float scale;
  std::vector<Pair> query_pairs, grad_pairs, query_columns, grad_columns, key_pairs;
  std::vector<float> scores, score_grads, added;  // a tile, [keys][queries]; the last what the mask adds
  std::vector<Pair> p, g, g_pairs;                // probabilities, scores' gradients: rounded; and in pairs of keys
  std::vector<float> dq, dk, dv, logsumexp, means;

  void tile(const Head& h, int64_t key, int64_t keys, int64_t query, int64_t queries) {
    multiply(keys, queries, d / 2, Left(h.k.below(key)), {&query_columns[query], lp}, {scores.data(), kQueries, false});
    multiply(keys, queries, d / 2, Left(h.v.below(key)), {&grad_columns[query], lp},
             {score_grads.data(), kQueries, false});
    if (h.mask.address) read_mask(h.mask, key, keys, query, std::min(queries, l - query));
    differentiate(key, keys, query, queries);
    const int64_t pairs = query / 2 * d;
    multiply(keys, d, queries / 2, {p.data(), 2 * kQueries, 4}, {&grad_pairs[pairs], d}, {dv.data(), d, true});
    multiply(keys, d, queries / 2, {g.data(), 2 * kQueries, 4}, {&query_pairs[pairs], d}, {dk.data(), d, true});
    multiply(queries, d, (keys + 1) / 2, {g_pairs.data(), 4, 4 * kQueries}, {&key_pairs[key / 2 * d], d},
             {&dq[query * d], d, true});
  }

  void read_mask(const Mask& mask, int64_t key, int64_t keys, int64_t query, int64_t queries) {
    with_dtype(mask.dtype, [&](auto type) {
      const int64_t offset = mask.offset + key * mask.key_stride + query * mask.query_stride;
      const auto* from = pointer<decltype(type)>(mask.address, offset);
      for (int64_t i = 0; i < keys; ++i)
        for (int64_t j = 0; j < queries; ++j)
          added[i * kQueries + j] = widen(from[i * mask.key_stride + j * mask.query_stride]);
    });
  }

  // From a tile's scores, and the gradients of its probabilities: probabilities, and gradients of scores.
  void differentiate(int64_t key, int64_t keys, int64_t query, int64_t queries) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < keys; i += 2)
      for (int64_t j = 0; j < queries; j += 16) {
        const __m512i position = _mm512_add_epi32(lanes, _mm512_set1_epi32(int(query + j)));
        const __mmask16 inside = _mm512_cmplt_epi32_mask(position, _mm512_set1_epi32(int(l)));
        __m256i rounded[2] = {};
        for (int64_t k = i; k < std::min(i + 2, keys); ++k) {
          const int64_t at = k * kQueries + j;
          const __mmask16 seen =
              causal ? _mm512_mask_cmpge_epi32_mask(inside, position, _mm512_set1_epi32(int(key + k))) : inside;
          // As in forward, where a mask of the lowest number swallows the scores.
          const __m512 score = _mm512_fmadd_ps(_mm512_loadu_ps(&scores[at]), factor, _mm512_loadu_ps(&added[at]));
          const __m512 exponent = _mm512_sub_ps(score, _mm512_loadu_ps(&logsumexp[query + j]));
          const __m512 probability = _mm512_maskz_mov_ps(seen, exponential(exponent));
          const __m512 apart = _mm512_sub_ps(_mm512_loadu_ps(&score_grads[at]), _mm512_loadu_ps(&means[query + j]));
          const __m512 grad = _mm512_maskz_mul_ps(seen, _mm512_mul_ps(probability, apart), factor);
          rounded[k - i] = (__m256i)_mm512_cvtneps_pbh(grad);
          _mm256_storeu_si256((__m256i*)&p[at / 2], (__m256i)_mm512_cvtneps_pbh(probability));
          _mm256_storeu_si256((__m256i*)&g[at / 2], rounded[k - i]);
        }
        _mm512_storeu_si512(&g_pairs[i / 2 * kQueries + j], side_by_side(rounded[0], rounded[1]));
      }
  }
};
#endif
