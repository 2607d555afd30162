#include "file_space.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>

#include "memory.h"
#include "system_libraries.h"

namespace deeprec {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kFirstExtent = size_t{64} << 20;
constexpr size_t kLastExtent = size_t{64} << 30;

size_t Pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void ThrowNoFile(int error, const std::string& directory) {
  const std::string message = "Cannot make a file in storage_path: " + std::string(std::strerror(error)) +
                              ". Received: storage_path=" + directory;
  if (error == ENOSPC || error == EDQUOT) throw StorageFull(message);
  throw std::invalid_argument(message);
}

// Without a name, the file goes with the process, however that ends.
int MakeFile(const std::string& directory) {
  std::string path = directory + "/deeprec-XXXXXX";
  const int file = mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) ThrowNoFile(errno, directory);
  unlink(path.c_str());
  return file;
}

struct Mapping {
  char* data;  // null: none
  bool libpmem, synced;
};

Mapping Map(int file, size_t bytes) {
  if (const auto pmem = MapPmem("/proc/self/fd/" + std::to_string(file), bytes)) {
    if (pmem->data != nullptr && pmem->bytes == bytes) return {pmem->data, true, pmem->is_pmem};
    if (pmem->data != nullptr) UnmapPmem(pmem->data, pmem->bytes);
  }
  void* base = MAP_FAILED;
#if defined(MAP_SYNC) && defined(MAP_SHARED_VALIDATE)
  base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, file, 0);
#endif
  const bool synced = base != MAP_FAILED;
  if (!synced) base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return {base == MAP_FAILED ? nullptr : static_cast<char*>(base), false, synced};
}

void Unmap(char* data, size_t bytes, bool libpmem) {
  if (libpmem) {
    UnmapPmem(data, bytes);
  } else {
    munmap(data, bytes);
  }
}

std::atomic<unsigned> generation{0};

}  // namespace

unsigned ForkGeneration() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

FileSpace::~FileSpace() {
  for (const Extent& extent : extents_) {
    Unmap(extent.data, extent.bytes, extent.libpmem);
    close(extent.file);
  }
}

void FileSpace::AddExtent(size_t least) {
  size_t bytes = extents_.empty() ? kFirstExtent : std::min(2 * extents_.back().bytes, kLastExtent);
  bytes = std::max(bytes, Pages(least));
  extents_.reserve(extents_.size() + 1);
  const int file = MakeFile(directory_);
  const Mapping mapping = Map(file, bytes);
  if (mapping.data == nullptr) {
    close(file);
    throw std::bad_alloc();
  }
  madvise(mapping.data, bytes, MADV_RANDOM);
  extents_.push_back({file, mapping.data, bytes, 0, mapping.libpmem});
}

char* FileSpace::Allocate(size_t bytes) {
  bytes = Pages(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto same = free_.find(bytes);
  if (same != free_.end()) {
    char* data = same->second;
    free_.erase(same);
    return data;
  }
  if (extents_.empty() || extents_.back().bytes - extents_.back().used < bytes) AddExtent(bytes);
  Extent& extent = extents_.back();
  extent.used += bytes;
  return extent.data + extent.used - bytes;
}

void FileSpace::Free(char* data, size_t bytes) {
  Discard(data, Pages(bytes));
  std::lock_guard<std::mutex> lock(mutex_);
  free_.emplace(Pages(bytes), data);
}

FileSpace::Extent FileSpace::Find(const char* data) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto extent = std::find_if(extents_.begin(), extents_.end(),
                                   [&](const Extent& one) { return one.data <= data && data < one.data + one.bytes; });
  return *extent;
}

void FileSpace::Reserve(char* data, size_t bytes) {
  if (bytes == 0) return;
  const Extent extent = Find(data);
  if (generation_ != ForkGeneration()) throw std::runtime_error("A forked process cannot write to its parent's files.");
  const int failure =
      posix_fallocate(extent.file, static_cast<off_t>(data - extent.data), static_cast<off_t>(Pages(bytes)));
  if (failure == 0) return;
  throw StorageFull("Cannot reserve " + std::to_string(Pages(bytes)) + " bytes in storage_path: " +
                    std::string(std::strerror(failure)) + ". Received: storage_path=" + directory_);
}

void FileSpace::Discard(char* data, size_t bytes) {
  if (bytes == 0 || generation_ != ForkGeneration()) return;
  const Extent extent = Find(data);
  const auto offset = static_cast<off_t>(data - extent.data);
  // A file system without holes keeps the space for what comes next.
  static_cast<void>(
      fallocate(extent.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes)));
}

std::string FileSpace::Describe(const std::string& directory) {
  const int file = MakeFile(directory);
  const Mapping mapping = Map(file, kPage);
  close(file);
  if (mapping.data == nullptr) throw std::bad_alloc();
  Unmap(mapping.data, kPage, mapping.libpmem);
  return std::string(mapping.libpmem ? "libpmem, " : "") + (mapping.synced ? "MAP_SYNC" : "file");
}

}  // namespace deeprec
