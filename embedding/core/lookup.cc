#include "lookup.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>

#include "thread_pool.h"

namespace deeprec {
namespace {

constexpr size_t kIdsOfTask = 8192;
constexpr size_t kAhead = 12;  // ids whose rows are fetched before they are needed

// Vectors of a width that the compiler knows (0: any), so that a row is a few instructions and not a loop.
template <size_t kWidth>
struct Vectors {
  explicit Vectors(size_t width) : any(width) {}
  size_t width() const { return kWidth == 0 ? any : kWidth; }

  void Add(const float* __restrict from, float* __restrict to) const {
    for (size_t i = 0; i < width(); ++i) to[i] += from[i];
  }

  void Divide(float* __restrict values, float by) const {
    for (size_t i = 0; i < width(); ++i) values[i] /= by;
  }

  const size_t any;
};

template <class Body>
void WithWidth(size_t width, const Body& body) {
  switch (width) {
    case 4:
      return body(Vectors<4>(width));
    case 8:
      return body(Vectors<8>(width));
    case 16:
      return body(Vectors<16>(width));
    case 32:
      return body(Vectors<32>(width));
    case 64:
      return body(Vectors<64>(width));
    default:
      return body(Vectors<0>(width));
  }
}

// What a bag's sum is divided by.
float Divisor(Combiner combiner, size_t ids) {
  if (combiner == Combiner::kMean) return static_cast<float>(ids);
  if (combiner == Combiner::kSqrtN) return std::sqrt(static_cast<float>(ids));
  return 1;
}

struct Bag {
  size_t begin, end;
};

Bag BagOf(const LookupCall& call, size_t output) {
  if (call.ends == nullptr) return {output * call.length, (output + 1) * call.length};
  return {output == 0 ? 0 : static_cast<size_t>(call.ends[output - 1]), static_cast<size_t>(call.ends[output])};
}

// Outputs [begin, end) of a call; false for a number that is no row of its table.
template <class V>
bool SumSome(const LookupCall& call, const V& vectors, const float* rows, size_t begin, size_t end, float* outputs) {
  const size_t width = vectors.width();
  const size_t count = call.row_end - call.row_begin;
  const size_t ids = call.ids();
  for (size_t output = begin; output < end; ++output) {
    float* sum = outputs + (call.first_output + output) * width;
    const Bag bag = BagOf(call, output);
    for (size_t i = bag.begin; i < bag.end; ++i) {
      if (i + kAhead < ids) __builtin_prefetch(rows + static_cast<size_t>(call.numbers[i + kAhead]) * width);
      const size_t number = static_cast<size_t>(call.numbers[i]);
      if (number - call.row_begin >= count) return false;
      const float* row = rows + number * width;
      if (i == bag.begin) {
        std::memcpy(sum, row, width * sizeof(float));
      } else {
        vectors.Add(row, sum);
      }
    }
    if (bag.begin == bag.end) {
      std::memset(sum, 0, width * sizeof(float));
    } else if (call.combiner != Combiner::kSum && bag.end - bag.begin > 1) {
      vectors.Divide(sum, Divisor(call.combiner, bag.end - bag.begin));
    }
  }
  return true;
}

// The rows [begin, end) of one table, and which calls read it.
struct RowTask {
  size_t begin, end, ids;
  size_t row_begin;  // of the table
};

// Parts of all tables with about the same number of ids, the largest first.
std::vector<RowTask> RowTasks(const std::vector<LookupGradient>& parts) {
  std::map<size_t, RowTask> tables;
  size_t total = 0;
  for (const LookupGradient& part : parts) {
    for (const LookupCall& call : part.calls) {
      if (call.row_begin == call.row_end) continue;  // it begins where another table does
      RowTask& table =
          tables.try_emplace(call.row_begin, RowTask{call.row_begin, call.row_end, 0, call.row_begin}).first->second;
      table.ids += call.ids();
      total += call.ids();
    }
  }
  const size_t share = std::max<size_t>(total / NumThreads() + 1, kIdsOfTask);
  std::vector<RowTask> tasks;
  for (const auto& [row_begin, table] : tables) {
    const size_t pieces = std::max<size_t>((table.ids + share - 1) / share, 1);
    const size_t rows = table.end - table.begin;
    for (size_t piece = 0; piece < pieces; ++piece) {
      tasks.push_back({table.begin + rows * piece / pieces, table.begin + rows * (piece + 1) / pieces,
                       table.ids / pieces, row_begin});
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const RowTask& a, const RowTask& b) { return a.ids > b.ids; });
  return tasks;
}

template <class V>
float SumRows(const std::vector<LookupGradient>& parts, const RowTask& task, const V& vectors, float* rows) {
  const size_t width = vectors.width();
  const size_t count = task.end - task.begin;
  std::memset(rows + task.begin * width, 0, count * width * sizeof(float));
  std::vector<float> divided(width);
  for (const LookupGradient& part : parts) {
    for (const LookupCall& call : part.calls) {
      if (call.row_begin != task.row_begin) continue;
      const size_t ids = call.ids();
      for (size_t output = 0; output < call.outputs; ++output) {
        const float* gradient = part.outputs + (call.first_output + output) * width;
        const Bag bag = BagOf(call, output);
        if (call.combiner != Combiner::kSum && bag.end - bag.begin > 1) {
          std::memcpy(divided.data(), gradient, width * sizeof(float));
          vectors.Divide(divided.data(), Divisor(call.combiner, bag.end - bag.begin));
          gradient = divided.data();
        }
        for (size_t i = bag.begin; i < bag.end; ++i) {
          if (i + kAhead < ids) {
            const size_t next = static_cast<size_t>(call.numbers[i + kAhead]);
            if (next - task.begin < count) __builtin_prefetch(rows + next * width, 1);
          }
          const size_t number = static_cast<size_t>(call.numbers[i]);
          if (number - task.begin < count) vectors.Add(gradient, rows + number * width);
        }
      }
    }
  }
  // A few sums side by side, which the compiler may keep in one register.
  float sums[8] = {};
  const float* values = rows + task.begin * width;
  const size_t elements = count * width;
  for (size_t i = 0; i + 8 <= elements; i += 8) {
    for (size_t lane = 0; lane < 8; ++lane) sums[lane] += values[i + lane];
  }
  return std::accumulate(values + elements / 8 * 8, values + elements, std::accumulate(sums, sums + 8, 0.0f));
}

}  // namespace

void SumBags(const std::vector<LookupCall>& calls, const float* rows, size_t width, float* outputs) {
  struct Task {
    const LookupCall* call;
    size_t begin, end;
  };
  std::vector<Task> tasks;
  for (const LookupCall& call : calls) {
    const size_t ids_of_output = std::max<size_t>(call.outputs == 0 ? 1 : call.ids() / call.outputs, 1);
    const size_t step = std::max<size_t>(kIdsOfTask / ids_of_output, 1);
    for (size_t begin = 0; begin < call.outputs; begin += step) {
      tasks.push_back({&call, begin, std::min(begin + step, call.outputs)});
    }
  }
  std::atomic<bool> valid{true};
  WithWidth(width, [&](const auto& vectors) {
    ParallelFor(tasks.size(), [&](size_t i) {
      const Task& task = tasks[i];
      if (!SumSome(*task.call, vectors, rows, task.begin, task.end, outputs)) valid = false;
    });
  });
  if (!valid) throw std::invalid_argument("An id has a number that is no row of its table.");
}

float SumByRow(const std::vector<LookupGradient>& parts, size_t num_rows, size_t width, float* rows) {
  const std::vector<RowTask> tasks = RowTasks(parts);
  size_t covered = 0;
  for (const RowTask& task : tasks) covered += task.end - task.begin;
  if (covered != num_rows) throw std::invalid_argument("The calls' tables do not make up all rows.");
  std::vector<float> sums(tasks.size());
  WithWidth(width, [&](const auto& vectors) {
    ParallelFor(tasks.size(), [&](size_t i) { sums[i] = SumRows(parts, tasks[i], vectors, rows); });
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0f);
}

}  // namespace deeprec
