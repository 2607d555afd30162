// Fused lookups: the rows of a batch's distinct keys spread over its ids, bags summed on the way, and gradients summed
// back by row. What passes between this and a model is one row for each bag instead of one for each id.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deeprec {

enum class Combiner : int64_t { kSum, kMean, kSqrtN };

// One call of a layer. Each output sums the rows of a bag of ids; bags follow each other in `numbers`.
struct LookupCall {
  const int32_t* numbers;  // the row of each id
  const int32_t* ends;     // where each bag ends, counted from the call's first id; null: all hold `length` ids
  size_t outputs;
  size_t length;
  size_t first_output;  // among the outputs of all calls
  // The rows of the call's table, which no other table's calls use.
  size_t row_begin, row_end;
  Combiner combiner;

  size_t ids() const { return ends == nullptr ? outputs * length : outputs == 0 ? 0 : ends[outputs - 1]; }
};

// outputs[o] = sum (mean, sum / sqrt(n)) of its bag's rows; an empty bag is zeros. In the order of the ids.
// Throws std::invalid_argument for a number outside of its table's rows.
void SumBags(const std::vector<LookupCall>& calls, const float* rows, size_t width, float* outputs);

// One batch part's calls and the gradient of their outputs.
struct LookupGradient {
  std::vector<LookupCall> calls;
  const float* outputs;
};

// rows[r] = the sum over all ids of row r of what SumBags' gradient gives them, in the order of parts, calls and ids,
// whatever the number of threads. Returns a sum of all elements, which is finite only if each of them is.
float SumByRow(const std::vector<LookupGradient>& parts, size_t num_rows, size_t width, float* rows);

}  // namespace deeprec
