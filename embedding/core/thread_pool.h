// A small persistent pool for data-parallel loops. Any number of threads may call ParallelFor at once; the caller
// works too, so a call always makes progress. A forked child starts with a pool of its own.
#pragma once

#include <cstddef>
#include <functional>

namespace deeprec {

// Threads that a loop may use, the caller included.
size_t NumThreads();

// Sets NumThreads for loops that start from now on; at least 1.
void SetNumThreads(size_t threads);

// Runs body(task) once for every task in [0, tasks), in any order and on any thread; returns when all are done.
// The first exception of a body is thrown to the caller.
void ParallelFor(size_t tasks, const std::function<void(size_t)>& body);

}  // namespace deeprec
