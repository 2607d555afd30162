// Python bindings: numpy arrays in and out, the GIL released while the engine works. Arguments are checked by the
// Python layer (types, shapes); what could corrupt memory is checked here again.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "hashing.h"
#include "memory.h"
#include "table.h"
#include "thread_pool.h"

namespace py = pybind11;

namespace deeprec {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Keys64 = Array<int64_t>;
using Floats = Array<float>;

// A new 64-byte aligned array whose memory comes from the pool.
template <class T>
py::array_t<T> NewArray(std::vector<py::ssize_t> shape) {
  size_t elements = 1;
  for (py::ssize_t extent : shape) elements *= static_cast<size_t>(extent);
  void* buffer = AcquireBuffer(elements * sizeof(T));
  py::capsule owner(buffer, [](void* memory) { ReleaseBuffer(memory); });
  return py::array_t<T>(std::move(shape), static_cast<T*>(buffer), owner);
}

template <class T>
py::array_t<T> ToArray(const std::vector<T>& values) {
  auto array = NewArray<T>({static_cast<py::ssize_t>(values.size())});
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

void Require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

KeySpan Span(const Keys64& keys) {
  Require(keys.ndim() == 1, "keys must have one axis.");
  return KeySpan{keys.data(), nullptr, static_cast<size_t>(keys.size())};
}

KeySpan Span(const Keys64& keys, const py::object& counts) {
  KeySpan span = Span(keys);
  if (!counts.is_none()) {
    Require(py::isinstance<Keys64>(counts), "counts must be a contiguous int64 array.");
    const auto array = py::reinterpret_borrow<Keys64>(counts);
    Require(array.ndim() == 1 && array.size() == keys.size(), "counts must have one number for each key.");
    span.counts = array.data();
  }
  return span;
}

void RequireRows(const Floats& rows, size_t n, size_t dim) {
  Require(static_cast<size_t>(rows.size()) == n * dim, "rows must be [keys, dim].");
}

py::array_t<float> NewRows(size_t n, size_t dim) {
  return NewArray<float>({static_cast<py::ssize_t>(n), static_cast<py::ssize_t>(dim)});
}

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
    py::gil_scoped_release release;
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
  py::gil_scoped_release release;
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
    py::gil_scoped_release release;
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
  py::gil_scoped_release release;
  for (size_t i = 0; i < span.n; ++i) out[i] = BucketOf(Mix64(static_cast<uint64_t>(span.keys[i])));
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
  py::gil_scoped_release release;
  for (size_t i = 0; i < n; ++i) {
    out[i] = static_cast<int64_t>(Fingerprint64(bytes + at[i], static_cast<size_t>(at[i + 1] - at[i])));
  }
  return result;
}

py::dict ExportRows(Table& table, const Keys64& keys) {
  const KeySpan span = Span(keys);
  const auto n = static_cast<py::ssize_t>(span.n);
  py::dict result;
  auto present = NewArray<bool>({n});
  result["present"] = present;
  RowColumns columns;
  const auto integers = [&](const char* name) {
    auto column = NewArray<int64_t>({n});
    result[name] = column;
    return column.mutable_data();
  };
  columns.frequency = integers("frequency");
  columns.version = integers("version");
  if (table.has_time()) columns.time = integers("time");
  if (table.has_blocks()) columns.blocks = integers("blocks");
  auto value = NewRows(span.n, table.dim());
  result["value"] = value;
  columns.value = value.mutable_data();
  py::dict slots;
  for (size_t s = 0; s < table.optimizer().slots().size(); ++s) {
    auto slot = NewRows(span.n, table.slot_width(s));
    columns.slots.push_back(slot.mutable_data());
    slots[table.optimizer().slots()[s].name.c_str()] = slot;
  }
  result["slots"] = slots;
  auto* flags = reinterpret_cast<uint8_t*>(present.mutable_data());
  py::gil_scoped_release release;
  table.Export(span, flags, columns);
  return result;
}

// A column of int64, or null for None.
int64_t* OptionalColumn(const py::object& column, size_t n) {
  if (column.is_none()) return nullptr;
  Require(py::isinstance<Keys64>(column), "A column must be a contiguous int64 array.");
  const auto array = py::reinterpret_borrow<Keys64>(column);
  Require(static_cast<size_t>(array.size()) == n, "One element of each column for each key.");
  return const_cast<int64_t*>(array.data());
}

void ImportRows(Table& table, const Keys64& keys, const Keys64& frequency, const Keys64& version,
                const py::object& time, const py::object& blocks, const Floats& value,
                const std::vector<Floats>& slots) {
  const KeySpan span = Span(keys);
  Require(frequency.size() == keys.size() && version.size() == keys.size(), "One frequency and version for each key.");
  Require(slots.size() == table.optimizer().slots().size(), "One array for each slot of the optimizer.");
  RequireRows(value, span.n, table.dim());
  // The engine only reads these columns.
  RowColumns columns;
  columns.frequency = const_cast<int64_t*>(frequency.data());
  columns.version = const_cast<int64_t*>(version.data());
  columns.time = OptionalColumn(time, span.n);
  columns.blocks = OptionalColumn(blocks, span.n);
  if (columns.blocks != nullptr) {
    for (size_t i = 0; i < span.n; ++i) Require(columns.blocks[i] >= 1, "blocks must be at least 1.");
  }
  columns.value = const_cast<float*>(value.data());
  for (size_t s = 0; s < slots.size(); ++s) {
    RequireRows(slots[s], span.n, table.slot_width(s));
    columns.slots.push_back(const_cast<float*>(slots[s].data()));
  }
  py::gil_scoped_release release;
  table.Import(span, columns);
}

// The Bloom counters of the buckets [first, last): uint8 [last - first, bytes of a bucket].
py::array_t<uint8_t> ExportBloom(Table& table, int first, int last) {
  Require(table.bloom() != nullptr, "The table has no Bloom filter.");
  Require(0 <= first && first <= last && last <= kNumBuckets, "No such buckets.");
  const size_t bytes = table.bloom()->bucket_bytes();
  auto result = NewArray<uint8_t>({last - first, static_cast<py::ssize_t>(bytes)});
  uint8_t* out = result.mutable_data();
  py::gil_scoped_release release;
  for (int bucket = first; bucket < last; ++bucket) {
    table.CopyBloom(bucket, reinterpret_cast<char*>(out + static_cast<size_t>(bucket - first) * bytes), false);
  }
  return result;
}

void ImportBloom(Table& table, int bucket, const py::bytes& counters) {
  Require(table.bloom() != nullptr, "The table has no Bloom filter.");
  Require(0 <= bucket && bucket < kNumBuckets, "No such bucket.");
  const std::string_view view = counters;
  Require(view.size() == table.bloom()->bucket_bytes(), "The counters have another size.");
  table.CopyBloom(bucket, const_cast<char*>(view.data()), true);
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
  py::gil_scoped_release release;
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

py::dict StatsDict(const Table& table) {
  TableStats stats;
  {
    py::gil_scoped_release release;
    stats = table.Stats();
  }
  py::dict result;
  result["rows"] = stats.rows;
  result["admitted"] = stats.admitted;
  result["filtered"] = stats.filtered;
  result["evicted"] = stats.evicted;
  result["lookups"] = stats.lookups;
  result["hits"] = stats.hits;
  result["dropped"] = stats.dropped;
  result["bytes"] = stats.bytes;
  result["promoted"] = stats.promoted;
  result["demoted"] = stats.demoted;
  py::list tiers;
  for (const TierStats& tier : stats.tiers) {
    py::dict one;
    one["kind"] = tier.kind;
    one["rows"] = tier.rows;
    one["bytes"] = tier.bytes;
    tiers.append(std::move(one));
  }
  result["tiers"] = tiers;
  return result;
}

template <class T>
T Get(const py::dict& values, const char* name) {
  return values[name].cast<T>();
}

TierKind ParseTier(const std::string& kind) {
  if (kind == "DRAM") return TierKind::kDram;
  if (kind == "PMEM_LIBPMEM") return TierKind::kPmemFile;
  if (kind == "PMEM_MEMKIND") return TierKind::kPmemMemkind;
  if (kind == "SSDHASH") return TierKind::kSsd;
  if (kind == "LEVELDB") return TierKind::kLevelDb;
  throw std::invalid_argument("No such tier. Received: kind=" + kind);
}

AdmissionConfig ParseAdmission(const py::dict& values) {
  using Kind = AdmissionConfig::Kind;
  AdmissionConfig config;
  const auto kind = Get<std::string>(values, "kind");
  if (kind == "counter") {
    config.kind = Kind::kCounter;
    config.threshold = Get<uint32_t>(values, "threshold");
  } else if (kind == "bloom") {
    config.kind = Kind::kBloom;
    config.threshold = Get<uint32_t>(values, "threshold");
    config.counters = Get<uint64_t>(values, "counters");
    config.hashes = Get<int>(values, "hashes");
    config.counter_bytes = Get<int>(values, "counter_bytes");
  } else if (kind == "probability") {
    config.kind = Kind::kProbability;
    config.probability = Get<double>(values, "probability");
    config.seed = Get<uint64_t>(values, "seed");
  } else if (kind != "all") {
    throw std::invalid_argument("No such filter. Received: kind=" + kind);
  }
  return config;
}

std::unique_ptr<Table> MakeTable(const Optimizer& optimizer, const py::dict& values) {
  const auto initializer = Get<py::dict>(values, "initializer");
  TableConfig config{
      Get<size_t>(values, "dim"),
      Get<bool>(values, "bfloat16") ? ValueType::kBFloat16 : ValueType::kFloat32,
      optimizer,
      Initializer(Get<std::string>(initializer, "kind"), Get<double>(initializer, "a"), Get<double>(initializer, "b"),
                  Get<uint64_t>(values, "seed")),
      ParseAdmission(Get<py::dict>(values, "admission")),
      Get<float>(values, "no_permission"),
      {Get<int64_t>(values, "steps_to_live"), Get<int64_t>(values, "seconds_to_live"),
       Get<double>(values, "l2_threshold")},
      {Get<size_t>(values, "blocks"), Get<std::vector<uint32_t>>(values, "block_thresholds"),
       Get<bool>(values, "block_by_rank"), Get<double>(values, "block_rank_base"), Get<double>(values, "block_decay")},
      {},
      Get<bool>(values, "lru")};
  for (const py::handle tier : Get<py::list>(values, "tiers")) {
    const auto one = tier.cast<py::dict>();
    config.tiers.push_back({ParseTier(Get<std::string>(one, "kind")), Get<uint64_t>(one, "bytes"),
                            Get<std::string>(one, "path"), Get<int>(one, "node")});
  }
  py::gil_scoped_release release;
  return std::make_unique<Table>(config);
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
  module.def("pull", &PullTables, py::arg("tables"), py::arg("keys"), py::arg("counts"), py::arg("train"));
  module.def("push", &PushTables, py::arg("tables"), py::arg("keys"), py::arg("gradients"), py::arg("step"),
             py::arg("learning_rate"), py::arg("now"));

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

  py::class_<Table>(module, "Table")
      .def(py::init(&MakeTable), py::arg("optimizer"), py::arg("config"))
      .def_property("updates", &Table::updates, &Table::set_updates)
      .def_property("calls", &Table::calls, &Table::set_calls)
      .def("slot_width", &Table::slot_width, py::arg("slot"))
      .def(
          "upsert",
          [](Table& table, const Keys64& keys, const Floats& values) {
            const KeySpan span = Span(keys);
            RequireRows(values, span.n, table.dim());
            py::gil_scoped_release release;
            table.Upsert(span, values.data());
          },
          py::arg("keys").noconvert(), py::arg("values").noconvert())
      .def(
          "erase",
          [](Table& table, const Keys64& keys) {
            const KeySpan span = Span(keys);
            py::gil_scoped_release release;
            return table.Erase(span);
          },
          py::arg("keys").noconvert())
      .def(
          "evict",
          [](Table& table, int64_t step, int64_t now) {
            std::vector<int64_t> evicted;
            {
              py::gil_scoped_release release;
              evicted = table.Evict(step, now);
            }
            return ToArray(evicted);
          },
          py::arg("step"), py::arg("now"))
      .def(
          "contains",
          [](Table& table, const Keys64& keys) {
            const KeySpan span = Span(keys);
            auto present = NewArray<bool>({static_cast<py::ssize_t>(span.n)});
            auto* flags = reinterpret_cast<uint8_t*>(present.mutable_data());
            {
              py::gil_scoped_release release;
              table.Export(span, flags, {});
            }
            return present;
          },
          py::arg("keys").noconvert())
      .def("refresh_ranks", &Table::RefreshRanks, py::call_guard<py::gil_scoped_release>())
      .def("maintain", &Table::Maintain, py::call_guard<py::gil_scoped_release>())
      .def("record_tombstones", &Table::RecordTombstones, py::arg("on"))
      .def("take_tombstones",
           [](Table& table) {
             std::vector<int64_t> keys;
             {
               py::gil_scoped_release release;
               keys = table.TakeTombstones();
             }
             return ToArray(keys);
           })
      .def("export_bloom", &ExportBloom, py::arg("first"), py::arg("last"))
      .def("import_bloom", &ImportBloom, py::arg("bucket"), py::arg("counters"))
      .def("clear", &Table::Clear, py::call_guard<py::gil_scoped_release>())
      .def("keys",
           [](Table& table) {
             std::vector<int64_t> rows, filtered, counts;
             {
               py::gil_scoped_release release;
               table.Keys(&rows, &filtered, &counts);
             }
             return py::make_tuple(ToArray(rows), ToArray(filtered), ToArray(counts));
           })
      .def("export_rows", &ExportRows, py::arg("keys").noconvert())
      .def("import_rows", &ImportRows, py::arg("keys").noconvert(), py::arg("frequency").noconvert(),
           py::arg("version").noconvert(), py::arg("time"), py::arg("blocks"), py::arg("value").noconvert(),
           py::arg("slots"))
      .def(
          "import_filtered",
          [](Table& table, const Keys64& keys, const Keys64& counts) {
            const KeySpan span = Span(keys, counts);
            py::gil_scoped_release release;
            table.ImportFiltered(span);
          },
          py::arg("keys").noconvert(), py::arg("counts").noconvert())
      .def("stats", &StatsDict);
}
