// What the parts of the Python bindings share: numpy arrays in and out. Arguments are checked by the Python layer
// (types, shapes); what could corrupt memory is checked here again.
#pragma once

#include <cxxabi.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "batch.h"
#include "memory.h"
#include "table.h"

namespace py = pybind11;

namespace deeprec {

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Keys64 = Array<int64_t>;
using Floats = Array<float>;

// Lets other Python threads run while the engine works. When the interpreter is gone meanwhile (the process exits under
// a daemon thread), CPython ends the thread that asks for it back by unwinding its stack, which no C++ destructor lets
// through: the process would abort. Such a thread sleeps until the process has ended.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  ~GilRelease() {
    if (Finalizing()) Sleep();
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      Sleep();  // the interpreter went while this thread waited for it
    }
  }

 private:
  static bool Finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
  }
  [[noreturn]] static void Sleep() {
    for (;;) pause();
  }

  PyThreadState* state_;
};

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

inline void Require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

inline KeySpan Span(const Keys64& keys) {
  Require(keys.ndim() == 1, "keys must have one axis.");
  return KeySpan{keys.data(), nullptr, static_cast<size_t>(keys.size())};
}

inline KeySpan Span(const Keys64& keys, const py::object& counts) {
  KeySpan span = Span(keys);
  if (!counts.is_none()) {
    Require(py::isinstance<Keys64>(counts), "counts must be a contiguous int64 array.");
    const auto array = py::reinterpret_borrow<Keys64>(counts);
    Require(array.ndim() == 1 && array.size() == keys.size(), "counts must have one number for each key.");
    span.counts = array.data();
  }
  return span;
}

inline void RequireRows(const Floats& rows, size_t n, size_t dim) {
  Require(static_cast<size_t>(rows.size()) == n * dim, "rows must be [keys, dim].");
}

inline py::array_t<float> NewRows(size_t n, size_t dim) {
  return NewArray<float>({static_cast<py::ssize_t>(n), static_cast<py::ssize_t>(dim)});
}

// New arrays for `n` rows of a table, in a dict by column (slots in a dict of their own).
RowColumns NewColumns(const Table& table, size_t n, py::dict* arrays);

// Define the functions of fused lookups, and the classes Table and Snapshot.
void BindLookup(py::module_& module);
void BindTable(py::module_& module);
void BindSnapshot(py::module_& module);

}  // namespace deeprec
