// The Python class of a table.
#include "bindings.h"
#include "table.h"

namespace deeprec {

RowColumns NewColumns(const Table& table, size_t n, py::dict* arrays) {
  RowColumns columns;
  const auto integers = [&](const char* name) {
    auto column = NewArray<int64_t>({static_cast<py::ssize_t>(n)});
    (*arrays)[name] = column;
    return column.mutable_data();
  };
  columns.frequency = integers("frequency");
  columns.version = integers("version");
  if (table.has_time()) columns.time = integers("time");
  if (table.has_blocks()) columns.blocks = integers("blocks");
  if (table.has_ranks()) {
    columns.rank = integers("rank");
    columns.rank_refresh = integers("rank_refresh");
  }
  auto value = NewRows(n, table.dim());
  (*arrays)["value"] = value;
  columns.value = value.mutable_data();
  py::dict slots;
  for (size_t s = 0; s < table.optimizer().slots().size(); ++s) {
    auto slot = NewRows(n, table.slot_width(s));
    columns.slots.push_back(slot.mutable_data());
    slots[table.optimizer().slots()[s].name.c_str()] = slot;
  }
  (*arrays)["slots"] = slots;
  return columns;
}

namespace {

py::dict ExportRows(Table& table, const Keys64& keys) {
  const KeySpan span = Span(keys);
  py::dict result;
  auto present = NewArray<bool>({static_cast<py::ssize_t>(span.n)});
  result["present"] = present;
  const RowColumns columns = NewColumns(table, span.n, &result);
  auto* flags = reinterpret_cast<uint8_t*>(present.mutable_data());
  GilRelease release;
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
                const py::object& time, const py::object& blocks, const Floats& value, const std::vector<Floats>& slots,
                const py::object& rank, const py::object& rank_refresh) {
  const KeySpan span = Span(keys);
  Require(frequency.size() == keys.size() && version.size() == keys.size(), "One frequency and version for each key.");
  for (size_t i = 0; i < span.n; ++i) Require(frequency.data()[i] >= 0, "frequency must be at least 0.");
  Require(slots.size() == table.optimizer().slots().size(), "One array for each slot of the optimizer.");
  RequireRows(value, span.n, table.dim());
  // The engine only reads these columns.
  RowColumns columns;
  columns.frequency = const_cast<int64_t*>(frequency.data());
  columns.version = const_cast<int64_t*>(version.data());
  columns.time = OptionalColumn(time, span.n);
  columns.blocks = OptionalColumn(blocks, span.n);
  columns.rank = OptionalColumn(rank, span.n);
  columns.rank_refresh = OptionalColumn(rank_refresh, span.n);
  if (columns.blocks != nullptr) {
    for (size_t i = 0; i < span.n; ++i) Require(columns.blocks[i] >= 1, "blocks must be at least 1.");
  }
  columns.value = const_cast<float*>(value.data());
  for (size_t s = 0; s < slots.size(); ++s) {
    RequireRows(slots[s], span.n, table.slot_width(s));
    columns.slots.push_back(const_cast<float*>(slots[s].data()));
  }
  GilRelease release;
  table.Import(span, columns);
}

// The Bloom counters of the buckets [first, last): uint8 [last - first, bytes of a bucket].
py::array_t<uint8_t> ExportBloom(Table& table, int first, int last) {
  Require(table.bloom() != nullptr, "The table has no Bloom filter.");
  Require(0 <= first && first <= last && last <= kNumBuckets, "No such buckets.");
  const size_t bytes = table.bloom()->bucket_bytes();
  auto result = NewArray<uint8_t>({last - first, static_cast<py::ssize_t>(bytes)});
  uint8_t* out = result.mutable_data();
  GilRelease release;
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

py::dict StatsDict(const Table& table) {
  TableStats stats;
  {
    GilRelease release;
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
  result["background_error"] = stats.background_error;
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
      Get<bool>(values, "lru"),
      Get<std::string>(values, "name")};
  for (const py::handle tier : Get<py::list>(values, "tiers")) {
    const auto one = tier.cast<py::dict>();
    config.tiers.push_back({ParseTier(Get<std::string>(one, "kind")), Get<uint64_t>(one, "bytes"),
                            Get<std::string>(one, "path"), Get<int>(one, "node")});
  }
  GilRelease release;
  return std::make_unique<Table>(config);
}

}  // namespace

void BindTable(py::module_& module) {
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
            GilRelease release;
            table.Upsert(span, values.data());
          },
          py::arg("keys").noconvert(), py::arg("values").noconvert())
      .def(
          "erase",
          [](Table& table, const Keys64& keys) {
            const KeySpan span = Span(keys);
            GilRelease release;
            return table.Erase(span);
          },
          py::arg("keys").noconvert())
      .def(
          "evict",
          [](Table& table, int64_t step, int64_t now) {
            std::vector<int64_t> evicted;
            {
              GilRelease release;
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
              GilRelease release;
              table.Export(span, flags, {});
            }
            return present;
          },
          py::arg("keys").noconvert())
      .def("refresh_ranks", &Table::RefreshRanks, py::call_guard<GilRelease>())
      .def("ranks",
           [](Table& table) {
             int64_t refreshes = 0;
             std::vector<uint64_t> thresholds;
             {
               GilRelease release;
               table.Ranks(&refreshes, &thresholds);
             }
             return py::make_tuple(refreshes, thresholds);
           })
      .def("set_ranks", &Table::SetRanks, py::arg("refreshes"), py::arg("thresholds"), py::call_guard<GilRelease>())
      .def("maintain", &Table::Maintain, py::call_guard<GilRelease>())
      .def("mark_saved", &Table::MarkSaved, py::call_guard<GilRelease>())
      .def("export_bloom", &ExportBloom, py::arg("first"), py::arg("last"))
      .def("import_bloom", &ImportBloom, py::arg("bucket"), py::arg("counters"))
      .def("clear", &Table::Clear, py::call_guard<GilRelease>())
      .def("keys",
           [](Table& table) {
             std::vector<int64_t> rows, filtered, counts;
             {
               GilRelease release;
               table.Keys(&rows, &filtered, &counts);
             }
             return py::make_tuple(ToArray(rows), ToArray(filtered), ToArray(counts));
           })
      .def("export_rows", &ExportRows, py::arg("keys").noconvert())
      .def("reserve", &Table::Reserve, py::arg("rows"), py::call_guard<GilRelease>())
      .def("import_rows", &ImportRows, py::arg("keys").noconvert(), py::arg("frequency").noconvert(),
           py::arg("version").noconvert(), py::arg("time"), py::arg("blocks"), py::arg("value").noconvert(),
           py::arg("slots"), py::arg("rank") = py::none(), py::arg("rank_refresh") = py::none())
      .def(
          "import_filtered",
          [](Table& table, const Keys64& keys, const Keys64& counts) {
            const KeySpan span = Span(keys, counts);
            GilRelease release;
            table.ImportFiltered(span);
          },
          py::arg("keys").noconvert(), py::arg("counts").noconvert())
      .def("stats", &StatsDict);
}

}  // namespace deeprec
