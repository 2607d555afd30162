// The Python bindings of fused lookups.
#include <limits>

#include "bindings.h"
#include "lookup.h"

namespace deeprec {
namespace {

using Numbers = Array<int32_t>;

// The columns of the array that describes calls; what each means is said where Python wraps it.
enum Column { kFirstId, kOutputs, kLength, kFirstEnd, kRowBegin, kRowEnd, kCombiner, kColumns };

std::vector<LookupCall> Calls(const Numbers& numbers, const Numbers& ends, const Keys64& described, size_t num_rows,
                              size_t* outputs) {
  Require(described.ndim() == 2 && described.shape(1) == kColumns, "calls must be [calls, 7].");
  Require(numbers.ndim() == 1 && ends.ndim() == 1, "numbers and ends must have one axis.");
  std::vector<LookupCall> calls;
  *outputs = 0;
  for (py::ssize_t i = 0; i < described.shape(0); ++i) {
    const int64_t* call = described.data(i, 0);
    for (int column = 0; column < kColumns; ++column) {
      Require(column == kLength || call[column] >= 0, "calls must not be negative.");
      Require(call[column] <= std::numeric_limits<int32_t>::max(), "calls must fit 32 bits.");
    }
    Require(call[kRowBegin] <= call[kRowEnd] && static_cast<size_t>(call[kRowEnd]) <= num_rows,
            "The rows of a call must be among those that are given.");
    Require(call[kCombiner] <= static_cast<int64_t>(Combiner::kSqrtN), "There is no such combiner.");
    Require(call[kFirstId] <= numbers.size(), "The ids of a call must lie in numbers.");
    LookupCall found{};
    found.numbers = numbers.data() + call[kFirstId];
    found.outputs = static_cast<size_t>(call[kOutputs]);
    found.first_output = *outputs;
    found.row_begin = static_cast<size_t>(call[kRowBegin]);
    found.row_end = static_cast<size_t>(call[kRowEnd]);
    found.combiner = static_cast<Combiner>(call[kCombiner]);
    if (call[kLength] >= 0) {
      found.length = static_cast<size_t>(call[kLength]);
    } else {
      Require(call[kFirstEnd] + call[kOutputs] <= ends.size(), "The bags of a call must lie in ends.");
      found.ends = ends.data() + call[kFirstEnd];
      int32_t last = 0;
      for (size_t output = 0; output < found.outputs; ++output) {
        Require(found.ends[output] >= last, "ends must not decrease.");
        last = found.ends[output];
      }
    }
    Require(found.ids() <= static_cast<size_t>(numbers.size() - call[kFirstId]),
            "The ids of a call must lie in numbers.");
    *outputs += found.outputs;
    calls.push_back(found);
  }
  return calls;
}

py::array_t<float> Combined(const Floats& rows, const Numbers& numbers, const Numbers& ends, const Keys64& described) {
  Require(rows.ndim() == 2, "rows must be [rows, width].");
  size_t outputs = 0;
  const auto calls = Calls(numbers, ends, described, static_cast<size_t>(rows.shape(0)), &outputs);
  const auto width = static_cast<size_t>(rows.shape(1));
  auto result = NewRows(outputs, width);
  const float* from = rows.data();
  float* to = result.mutable_data();
  GilRelease release;
  SumBags(calls, from, width, to);
  return result;
}

py::tuple ByRow(const std::vector<Floats>& gradients, const std::vector<Numbers>& numbers,
                const std::vector<Numbers>& ends, const std::vector<Keys64>& described, size_t num_rows, size_t width) {
  Require(gradients.size() == numbers.size() && gradients.size() == ends.size() && gradients.size() == described.size(),
          "Numbers, ends and calls for each gradient.");
  std::vector<LookupGradient> parts;
  for (size_t i = 0; i < gradients.size(); ++i) {
    size_t outputs = 0;
    auto calls = Calls(numbers[i], ends[i], described[i], num_rows, &outputs);
    RequireRows(gradients[i], outputs, width);
    parts.push_back({std::move(calls), gradients[i].data()});
  }
  auto rows = NewRows(num_rows, width);
  float* to = rows.mutable_data();
  float sum = 0;
  {
    GilRelease release;
    sum = SumByRow(parts, num_rows, width, to);
  }
  return py::make_tuple(rows, sum);
}

}  // namespace

void BindLookup(py::module_& module) {
  module.def("sum_bags", &Combined, py::arg("rows").noconvert(), py::arg("numbers").noconvert(),
             py::arg("ends").noconvert(), py::arg("calls").noconvert());
  module.def("sum_by_row", &ByRow, py::arg("gradients"), py::arg("numbers"), py::arg("ends"), py::arg("calls"),
             py::arg("num_rows"), py::arg("width"));
}

}  // namespace deeprec
