#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "system_libraries.h"

namespace deeprec {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMapThreshold = size_t{1} << 20;

size_t RoundUp(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

[[noreturn]] void ThrowNoFile(int error, const std::string& directory, size_t bytes) {
  const std::string tail =
      " storage_path: " + std::string(std::strerror(error)) + ". Received: storage_path=" + directory;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    throw StorageFull("Cannot reserve " + std::to_string(bytes) + " bytes in" + tail);
  }
  if (error == ENOMEM) throw std::bad_alloc();
  throw std::invalid_argument("Cannot make a file in" + tail);
}

}  // namespace

ZeroedBlock::ZeroedBlock(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  if (bytes < kMapThreshold) {
    data_ = static_cast<char*>(std::aligned_alloc(64, RoundUp(bytes, 64)));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, bytes);
    return;
  }
  const bool huge = bytes >= kHugePage;
  const size_t wanted = RoundUp(bytes, 4096) + (huge ? kHugePage : 0);
  void* base = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(base);
  mapped_ = RoundUp(bytes, 4096);
  origin_ = Origin::kMapping;
  if (huge) {
    // Trim to a huge-page boundary; the advice is only a wish.
    char* aligned = reinterpret_cast<char*>(RoundUp(reinterpret_cast<uintptr_t>(start), kHugePage));
    const size_t head = static_cast<size_t>(aligned - start);
    if (head != 0) munmap(start, head);
    munmap(aligned + mapped_, wanted - head - mapped_);
    start = aligned;
    madvise(start, mapped_, MADV_HUGEPAGE);
  }
  data_ = start;
}

ZeroedBlock ZeroedBlock::InFile(const std::string& directory, size_t bytes, std::string* granted) {
  const size_t length = RoundUp(bytes, 4096);
  ZeroedBlock block;
  block.size_ = bytes;
  if (const auto pmem = MapPmem(directory, length)) {
    if (pmem->data == nullptr) ThrowNoFile(errno, directory, length);
    block.data_ = pmem->data;
    block.mapped_ = pmem->bytes;
    block.origin_ = Origin::kLibpmem;
    if (granted != nullptr) *granted = pmem->is_pmem ? "libpmem, MAP_SYNC" : "libpmem, file";
  } else {
    std::string path = directory + "/deeprec-XXXXXX";
    const int file = mkostemp(path.data(), O_CLOEXEC);
    if (file < 0) ThrowNoFile(errno, directory, length);
    // Without a name, the file goes with the process, however that ends.
    unlink(path.c_str());
    const int failure = posix_fallocate(file, 0, static_cast<off_t>(length));
    if (failure != 0) {
      close(file);
      ThrowNoFile(failure, directory, length);
    }
    void* base = MAP_FAILED;
#if defined(MAP_SYNC) && defined(MAP_SHARED_VALIDATE)
    base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, file, 0);
#endif
    if (granted != nullptr) *granted = base != MAP_FAILED ? "MAP_SYNC" : "file";
    if (base == MAP_FAILED) base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (base == MAP_FAILED) throw std::bad_alloc();
    block.data_ = static_cast<char*>(base);
    block.mapped_ = length;
    block.origin_ = Origin::kFile;
  }
  madvise(block.data_, block.mapped_, MADV_RANDOM);
  return block;
}

ZeroedBlock ZeroedBlock::OnNodes(int node, size_t bytes) {
  ZeroedBlock block;
  block.data_ = AllocateOnNodes(node, bytes);
  block.size_ = bytes;
  block.origin_ = Origin::kMemkind;
  return block;
}

void ZeroedBlock::Discard(size_t begin, size_t end) const {
  if (origin_ != Origin::kMapping && origin_ != Origin::kMemkind) return;
  if (origin_ == Origin::kMapping && end == size_) end = mapped_;
  const auto first = RoundUp(reinterpret_cast<uintptr_t>(data_) + begin, 4096);
  const auto last = (reinterpret_cast<uintptr_t>(data_) + end) / 4096 * 4096;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

ZeroedBlock::~ZeroedBlock() {
  if (data_ == nullptr) return;
  switch (origin_) {
    case Origin::kHeap:
      std::free(data_);
      break;
    case Origin::kMapping:
    case Origin::kFile:
      munmap(data_, mapped_);
      break;
    case Origin::kLibpmem:
      UnmapPmem(data_, mapped_);
      break;
    case Origin::kMemkind:
      FreeOnNodes(data_);
      break;
  }
}

void ZeroedBlock::Swap(ZeroedBlock& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  std::swap(origin_, other.origin_);
}

namespace {

// Every buffer starts with a header of one cache line that remembers its size class.
constexpr size_t kHeader = 64;
constexpr size_t kPooledFrom = size_t{64} << 10;
constexpr size_t kPoolLimit = size_t{256} << 20;

// Four classes for each power of two: at most a quarter is wasted.
size_t SizeClass(size_t bytes) {
  size_t step = 64;
  while (step * 8 < bytes) step *= 2;
  return RoundUp(bytes, step);
}

struct BufferPool {
  std::mutex mutex;
  std::vector<std::pair<size_t, char*>> free;
  size_t bytes = 0;
};

BufferPool& Buffers() {
  static auto* buffers = new BufferPool;
  return *buffers;
}

}  // namespace

void* AcquireBuffer(size_t bytes) {
  const size_t size = SizeClass(bytes + kHeader);
  if (size >= kPooledFrom) {
    BufferPool& pool = Buffers();
    std::lock_guard<std::mutex> lock(pool.mutex);
    for (size_t i = pool.free.size(); i-- > 0;) {
      if (pool.free[i].first != size) continue;
      char* base = pool.free[i].second;
      pool.free.erase(pool.free.begin() + static_cast<std::ptrdiff_t>(i));
      pool.bytes -= size;
      return base + kHeader;
    }
  }
  char* base = static_cast<char*>(std::aligned_alloc(64, size));
  if (base == nullptr) throw std::bad_alloc();
  std::memcpy(base, &size, sizeof(size));
  return base + kHeader;
}

void ReleaseBuffer(void* buffer) {
  char* base = static_cast<char*>(buffer) - kHeader;
  size_t size;
  std::memcpy(&size, base, sizeof(size));
  if (size >= kPooledFrom) {
    BufferPool& pool = Buffers();
    std::lock_guard<std::mutex> lock(pool.mutex);
    if (pool.bytes + size <= kPoolLimit) {
      pool.free.emplace_back(size, base);
      pool.bytes += size;
      return;
    }
  }
  std::free(base);
}

}  // namespace deeprec
