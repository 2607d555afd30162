// The Python class of a table's snapshot.
#include "bindings.h"
#include "snapshot.h"

namespace deeprec {
namespace {

std::unique_ptr<Snapshot> MakeSnapshot(Table& table, bool changed_only) {
  GilRelease release;
  return std::make_unique<Snapshot>(&table, changed_only);
}

py::dict ReadRows(Snapshot& snapshot, size_t begin, size_t n) {
  py::dict result;
  auto keys = NewArray<int64_t>({static_cast<py::ssize_t>(n)});
  result["key"] = keys;
  const RowColumns columns = NewColumns(snapshot.table(), n, &result);
  int64_t* out = keys.mutable_data();
  GilRelease release;
  snapshot.Read(begin, n, out, columns);
  return result;
}

py::tuple ReadFiltered(Snapshot& snapshot) {
  std::vector<int64_t> keys, counts;
  {
    GilRelease release;
    snapshot.Filtered(&keys, &counts);
  }
  return py::make_tuple(ToArray(keys), ToArray(counts));
}

py::array_t<int64_t> ReadTombstones(Snapshot& snapshot) {
  std::vector<int64_t> keys;
  {
    GilRelease release;
    keys = snapshot.Tombstones();
  }
  return ToArray(keys);
}

// The Bloom counters of the buckets [first, last): uint8 [last - first, bytes of a bucket].
py::array_t<uint8_t> ReadBloom(Snapshot& snapshot, int first, int last) {
  Require(snapshot.table().bloom() != nullptr, "The table has no Bloom filter.");
  Require(0 <= first && first <= last && last <= kNumBuckets, "No such buckets.");
  const size_t bytes = snapshot.table().bloom()->bucket_bytes();
  auto result = NewArray<uint8_t>({last - first, static_cast<py::ssize_t>(bytes)});
  auto* out = reinterpret_cast<char*>(result.mutable_data());
  GilRelease release;
  for (int bucket = first; bucket < last; ++bucket) {
    snapshot.Bloom(bucket, out + static_cast<size_t>(bucket - first) * bytes);
  }
  return result;
}

}  // namespace

void BindSnapshot(py::module_& module) {
  py::class_<Snapshot>(module, "Snapshot")
      .def(py::init(&MakeSnapshot), py::arg("table"), py::arg("changed_only"), py::keep_alive<1, 2>())
      .def_property_readonly("updates", &Snapshot::updates)
      .def_property_readonly("calls", &Snapshot::calls)
      .def_property_readonly("rank_refreshes", &Snapshot::rank_refreshes)
      .def_property_readonly("rank_thresholds", &Snapshot::rank_thresholds)
      .def_property_readonly("num_rows", &Snapshot::num_rows)
      .def_property_readonly("num_filtered", &Snapshot::num_filtered)
      .def_property_readonly("copied", &Snapshot::Copied)
      .def("read", &ReadRows, py::arg("begin"), py::arg("n"))
      .def("filtered", &ReadFiltered)
      .def("tombstones", &ReadTombstones)
      .def("bloom", &ReadBloom, py::arg("first"), py::arg("last"))
      .def("close", &Snapshot::Close, py::call_guard<GilRelease>());
}

}  // namespace deeprec
