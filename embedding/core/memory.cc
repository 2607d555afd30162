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

#include "file_space.h"
#include "system_libraries.h"

namespace deeprec {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMapThreshold = size_t{1} << 20;

size_t RoundUp(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

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

ZeroedBlock ZeroedBlock::InFile(std::shared_ptr<FileSpace> space, size_t bytes) {
  ZeroedBlock block;
  block.data_ = space->Allocate(bytes);
  block.size_ = bytes;
  block.mapped_ = RoundUp(bytes, 4096);
  block.origin_ = Origin::kFile;
  block.space_ = std::move(space);
  return block;
}

void ZeroedBlock::Reserve(size_t begin, size_t end) const {
  if (origin_ != Origin::kFile) return;
  begin = begin / 4096 * 4096;
  space_->Reserve(data_ + begin, RoundUp(end, 4096) - begin);
}

ZeroedBlock ZeroedBlock::OnNodes(int node, size_t bytes) {
  ZeroedBlock block;
  block.data_ = AllocateOnNodes(node, bytes);
  block.size_ = bytes;
  block.origin_ = Origin::kMemkind;
  return block;
}

void ZeroedBlock::Discard(size_t begin, size_t end) const {
  if (origin_ == Origin::kHeap) return;
  if (origin_ != Origin::kMemkind && end == size_) end = mapped_;
  const auto base = reinterpret_cast<uintptr_t>(data_);
  const auto first = RoundUp(base + begin, 4096), last = (base + end) / 4096 * 4096;
  if (first >= last) return;
  if (origin_ == Origin::kFile) {
    space_->Discard(data_ + (first - base), last - first);
  } else {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
}

ZeroedBlock::~ZeroedBlock() {
  if (data_ == nullptr) return;
  switch (origin_) {
    case Origin::kHeap:
      std::free(data_);
      break;
    case Origin::kMapping:
      munmap(data_, mapped_);
      break;
    case Origin::kFile:
      space_->Free(data_, mapped_);
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
  std::swap(space_, other.space_);
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
