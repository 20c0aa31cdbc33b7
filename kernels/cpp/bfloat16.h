// Matrices of bfloat16 for the instruction that multiplies pairs of them and adds in float32 (AVX512-BF16).
#pragma once
#include "chunks.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)  // where there is AMX, torch's own kernels use that
#define AMPCOMPILE_BFLOAT16 1
#include <immintrin.h>

using Pair = uint32_t;  // two neighbours along the dimension that a product sums over, the first in the low half

struct Rows {  // of bfloat16, each in one piece
  BFloat16* data;
  int64_t stride;
  Rows below(int64_t rows) const { return {data + rows * stride, stride}; }
  BFloat16* row(int64_t i) const { return data + i * stride; }
};

struct Left {  // [rows][depth] of pairs, anywhere: each is read alone
  const void* data;
  int64_t row_bytes, depth_bytes;
  explicit Left(const Rows& rows) : data(rows.data), row_bytes(2 * rows.stride), depth_bytes(4) {}
  Left(const void* data, int64_t row_bytes, int64_t depth_bytes)
      : data(data), row_bytes(row_bytes), depth_bytes(depth_bytes) {}
  const char* at(int64_t row, int64_t k) const {
    return static_cast<const char*>(data) + row * row_bytes + k * depth_bytes;
  }
};

struct Right {  // [depth][columns] of pairs
  const Pair* data;
  int64_t stride;
};

struct Result {  // [rows][columns] of float32; `add`: to what it holds
  float* data;
  int64_t stride;
  bool add;
};

// result = left * right, from a row and a column on: so many rows, and 16 columns times `wide`, kept in registers.
template <int rows, int wide>
void multiply_tile(int64_t row, int64_t column, int64_t depth, const Left& left, const Right& right,
                   const Result& result) {
  float* to = result.data + row * result.stride + column;
  __m512 sums[rows][wide];
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < wide; ++j)
      sums[i][j] = result.add ? _mm512_loadu_ps(to + i * result.stride + 16 * j) : _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; ++k) {
    __m512bh b[wide];
    for (int j = 0; j < wide; ++j)
      b[j] = (__m512bh)_mm512_loadu_si512(right.data + k * right.stride + column + 16 * j);
    for (int i = 0; i < rows; ++i) {
      int pair;
      std::memcpy(&pair, left.at(row + i, k), sizeof(pair));
      const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
      for (int j = 0; j < wide; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], a, b[j]);
    }
  }
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < wide; ++j) _mm512_storeu_ps(to + i * result.stride + 16 * j, sums[i][j]);
}

constexpr int kTallest = 6, kWidest = 4;  // with the operands, 29 of 32 registers

template <int wide, int tallest = kTallest, typename... Operands>
void multiply_rows(int64_t row, int64_t rows, Operands&&... operands) {
  if constexpr (tallest > 0) {
    for (; row + tallest <= rows; row += tallest) multiply_tile<tallest, wide>(row, operands...);
    multiply_rows<wide, tallest - 1>(row, rows, operands...);
  }
}

// result = left * right, for columns that 16 divides.
template <int widest = kWidest>
void multiply(int64_t rows, int64_t columns, int64_t depth, const Left& left, const Right& right, const Result& result,
              int64_t column = 0) {
  if constexpr (widest > 0) {
    for (; column + 16 * widest <= columns; column += 16 * widest)
      multiply_rows<widest>(0, rows, column, depth, left, right, result);
    multiply<widest - 1>(rows, columns, depth, left, right, result, column);
  }
}

inline __m512i side_by_side(__m256i low, __m256i high) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// to[n / 2][columns]: pairs down the columns, which 16 divides; a row beyond `n` counts as zeros.
inline void pair_rows(const Rows& from, int64_t n, int64_t columns, Pair* to) {
  const auto load = [&](int64_t i, int64_t d) { return _mm256_loadu_si256((const __m256i*)(from.row(i) + d)); };
  for (int64_t i = 0; i < n; i += 2, to += columns)
    for (int64_t d = 0; d < columns; d += 16)
      _mm512_storeu_si512(to + d, side_by_side(load(i, d), i + 1 < n ? load(i + 1, d) : _mm256_setzero_si256()));
}

// to[columns / 2][stride]: pairs along the rows, transposed.
inline void transpose_pairs(const Rows& from, int64_t n, int64_t columns, Pair* to, int64_t stride) {
  for (int64_t first = 0; first < n; first += 16)  // so few rows stay in the L1 cache
    for (int64_t j = 0; j < columns / 2; ++j)
      for (int64_t i = first; i < std::min(first + 16, n); ++i)
        std::memcpy(to + j * stride + i, from.row(i) + 2 * j, sizeof(Pair));
}

inline void round_rows(const float* from, int64_t n, int64_t columns, const Rows& to) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t d = 0; d < columns; ++d) narrow(from[i * columns + d], to.row(i)[d]);
}

inline __m512 load_wide(const BFloat16* from) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}

inline float dot(const BFloat16* a, const BFloat16* b, int64_t n) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) sum = _mm512_fmadd_ps(load_wide(a + i), load_wide(b + i), sum);
  return _mm512_reduce_add_ps(sum);
}

// e^x to 3 units in the last place; 0 below -104. NaN stays.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-110), x);  // the second operand if one is NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 sum = _mm512_set1_ps(1.f / 720);
  for (float factor : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f})
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(factor));
  return _mm512_scalef_ps(sum, n);
}
#else
#define AMPCOMPILE_BFLOAT16 0
#endif
