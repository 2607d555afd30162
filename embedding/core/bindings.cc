// The Python module: functions over batches and tables; the GIL is released while the engine works.
#include "bindings.h"

#include <limits>

#include "bfloat16.h"
#include "hashing.h"
#include "optimizer.h"
#include "system_libraries.h"
#include "table.h"
#include "thread_pool.h"

namespace deeprec {
namespace {

py::list PullTables(const std::vector<Table*>& tables, const std::vector<Keys64>& keys,
                    const std::vector<py::object>& counts, bool train) {
  Require(tables.size() == keys.size() && tables.size() == counts.size(), "One keys and counts for each table.");
  py::list results;
  std::vector<PullItem> items;
  for (size_t i = 0; i < tables.size(); ++i) {
    const KeySpan span = Span(keys[i], counts[i]);
    auto rows = NewRows(span.n, tables[i]->dim());
    items.push_back({tables[i], span, rows.mutable_data()});
    results.append(std::move(rows));
  }
  {
    GilRelease release;
    Pull(items, train);
  }
  return results;
}

void PushTables(const std::vector<Table*>& tables, const std::vector<Keys64>& keys,
                const std::vector<Floats>& gradients, int64_t step, double learning_rate, int64_t now) {
  Require(tables.size() == keys.size() && tables.size() == gradients.size(), "One keys and gradient for each table.");
  std::vector<PushItem> items;
  for (size_t i = 0; i < tables.size(); ++i) {
    const KeySpan span = Span(keys[i]);
    RequireRows(gradients[i], span.n, tables[i]->dim());
    items.push_back({tables[i], span, gradients[i].data()});
  }
  GilRelease release;
  Push(items, step, learning_rate, now);
}

py::tuple UniqueKeys(const std::vector<Keys64>& batches) {
  struct Part {
    const int64_t* keys;
    size_t n, distinct;
    int64_t* unique;
    int32_t* inverse;
    int64_t* counts;
  };
  std::vector<Part> parts;
  std::vector<py::array_t<int64_t>> unique, counts;
  std::vector<py::array_t<int32_t>> inverse;
  size_t total = 0;
  for (const Keys64& keys : batches) {
    const KeySpan span = Span(keys);
    Require(span.n < static_cast<size_t>(std::numeric_limits<int32_t>::max()),
            "A batch must have fewer than 2**31 - 1 keys.");
    const auto n = static_cast<py::ssize_t>(span.n);
    unique.push_back(NewArray<int64_t>({n}));
    inverse.push_back(NewArray<int32_t>({n}));
    counts.push_back(NewArray<int64_t>({n}));
    parts.push_back({span.keys, span.n, 0, unique.back().mutable_data(), inverse.back().mutable_data(),
                     counts.back().mutable_data()});
    total += span.n;
  }
  {
    GilRelease release;
    const auto work = [&](size_t i) {
      Part& part = parts[i];
      part.distinct = Unique(part.keys, part.n, part.unique, part.inverse, part.counts);
    };
    if (total < 4096) {
      for (size_t i = 0; i < parts.size(); ++i) work(i);
    } else {
      ParallelFor(parts.size(), work);
    }
  }
  py::tuple results(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    // Views of the first `distinct` elements keep the buffers alive.
    const auto head = py::slice(0, static_cast<py::ssize_t>(parts[i].distinct), 1);
    results[i] = py::make_tuple(unique[i][head], inverse[i], counts[i][head]);
  }
  return results;
}

py::array_t<int32_t> Buckets(const Keys64& keys) {
  const KeySpan span = Span(keys);
  auto result = NewArray<int32_t>({static_cast<py::ssize_t>(span.n)});
  int32_t* out = result.mutable_data();
  GilRelease release;
  for (size_t i = 0; i < span.n; ++i) out[i] = BucketOf(Mix64(static_cast<uint64_t>(span.keys[i])));
  return result;
}

// All parts one after another.
py::array_t<uint16_t> NarrowFloats(const std::vector<Floats>& parts) {
  py::ssize_t total = 0;
  for (const Floats& part : parts) total += part.size();
  auto result = NewArray<uint16_t>({total});
  uint16_t* out = result.mutable_data();
  std::vector<std::pair<const float*, size_t>> spans;
  for (const Floats& part : parts) spans.emplace_back(part.data(), static_cast<size_t>(part.size()));
  GilRelease release;
  for (const auto& [values, n] : spans) {
    ToBfloat16(values, n, out);
    out += n;
  }
  return result;
}

py::array_t<float> WidenFloats(const Array<uint16_t>& values) {
  auto result = NewArray<float>({values.size()});
  const uint16_t* from = values.data();
  float* to = result.mutable_data();
  const size_t n = static_cast<size_t>(values.size());
  GilRelease release;
  FromBfloat16(from, n, to);
  return result;
}

// Values i lies in data[offsets[i] .. offsets[i + 1]).
py::array_t<int64_t> Fingerprints(const Array<uint8_t>& data, const Keys64& offsets) {
  Require(offsets.ndim() == 1 && offsets.size() >= 1, "offsets must have one more element than there are values.");
  const size_t n = static_cast<size_t>(offsets.size()) - 1;
  const int64_t* at = offsets.data();
  for (size_t i = 0; i < n; ++i) Require(at[i] >= 0 && at[i] <= at[i + 1], "offsets must not decrease.");
  Require(at[n] <= data.size(), "offsets must lie within the data.");
  auto result = NewArray<int64_t>({static_cast<py::ssize_t>(n)});
  int64_t* out = result.mutable_data();
  const char* bytes = reinterpret_cast<const char*>(data.data());
  GilRelease release;
  for (size_t i = 0; i < n; ++i) {
    out[i] = static_cast<int64_t>(Fingerprint64(bytes + at[i], static_cast<size_t>(at[i + 1] - at[i])));
  }
  return result;
}

// Updates a flat vector in place, in parallel.
void ApplyDense(const Optimizer& optimizer, Floats values, std::vector<Floats> slots, const Floats& gradient,
                int64_t step, int64_t updates, double learning_rate) {
  Require(slots.size() == optimizer.slots().size(), "One array for each slot of the optimizer.");
  Require(optimizer.has_dense(), "This optimizer updates rows only.");
  Require(gradient.size() == values.size(), "The gradient must be as long as the vector.");
  const size_t n = static_cast<size_t>(values.size());
  float* w = values.mutable_data();
  const float* g = gradient.data();
  std::vector<float*> state;
  for (Floats& slot : slots) {
    Require(static_cast<size_t>(slot.size()) == n, "Each slot must be as long as the vector.");
    state.push_back(slot.mutable_data());
  }
  GilRelease release;
  const StepArgs args = optimizer.Prepare(step, updates, learning_rate);
  const Kernel kernel = optimizer.kernel(false);
  constexpr size_t kChunk = 32768;
  const auto work = [&](size_t chunk) {
    const size_t begin = chunk * kChunk;
    float* parts[4] = {};
    for (size_t s = 0; s < state.size(); ++s) parts[s] = state[s] + begin;
    kernel(args, w + begin, parts, g + begin, std::min(kChunk, n - begin));
  };
  ParallelFor((n + kChunk - 1) / kChunk, work);
}

}  // namespace
}  // namespace deeprec

PYBIND11_MODULE(_core, module) {
  using namespace deeprec;
  module.doc() = "The embedding engine.";
  module.attr("NUM_BUCKETS") = kNumBuckets;

  module.def("num_threads", &NumThreads);
  module.def("set_num_threads", &SetNumThreads, py::arg("threads"));
  module.def("cpu", [] { return ActiveKernels().name; });
  module.def("bucket", &Buckets, py::arg("keys").noconvert());
  module.def("fingerprint64", &Fingerprints, py::arg("data").noconvert(), py::arg("offsets").noconvert());
  module.def("unique_many", &UniqueKeys, py::arg("batches"));
  module.def("to_bfloat16", &NarrowFloats, py::arg("parts"));
  module.def("from_bfloat16", &WidenFloats, py::arg("values").noconvert());
  module.def("pull", &PullTables, py::arg("tables"), py::arg("keys"), py::arg("counts"), py::arg("train"));
  module.def("push", &PushTables, py::arg("tables"), py::arg("keys"), py::arg("gradients"), py::arg("step"),
             py::arg("learning_rate"), py::arg("now"));

  module.def("require_libpmem", &RequireLibpmem);
  module.def("require_memkind", &RequireMemkind, py::arg("node"));
  py::register_exception<StorageFull>(module, "StorageFullError", PyExc_MemoryError);
  py::class_<Optimizer>(module, "Optimizer")
      .def(py::init<const std::string&, const std::map<std::string, double>&>(), py::arg("kind"), py::arg("parameters"))
      .def_property_readonly("has_dense", &Optimizer::has_dense)
      .def_property_readonly("slots",
                             [](const Optimizer& optimizer) {
                               py::dict slots;
                               for (const SlotSpec& spec : optimizer.slots()) slots[spec.name.c_str()] = spec.initial;
                               return slots;
                             })
      .def("apply_dense", &ApplyDense, py::arg("values").noconvert(), py::arg("slots"), py::arg("gradient").noconvert(),
           py::arg("step"), py::arg("updates"), py::arg("learning_rate"));

  BindLookup(module);
  BindTable(module);
  BindSnapshot(module);
}
