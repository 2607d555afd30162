// Aligned memory: zeroed pages for tables, with huge pages where the system grants them, and pooled output buffers.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace deeprec {

class FileSpace;

// No room in a table's storage or on the disk. Nothing was changed.
class StorageFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Zeroed, 64-byte aligned memory; large blocks are mapped, advised to use huge pages, and cost nothing until touched.
class ZeroedBlock {
 public:
  ZeroedBlock() = default;
  explicit ZeroedBlock(size_t bytes);
  // The same in files, without space on the disk until Reserve.
  static ZeroedBlock InFile(std::shared_ptr<FileSpace> space, size_t bytes);
  // The same on NUMA nodes, by memkind; see AllocateOnNodes.
  static ZeroedBlock OnNodes(int node, size_t bytes);

  ZeroedBlock(ZeroedBlock&& other) noexcept { Swap(other); }
  ZeroedBlock& operator=(ZeroedBlock&& other) noexcept {
    Swap(other);
    return *this;
  }
  ~ZeroedBlock();

  // In files: takes the space for the pages of [begin, end) on the disk. Throws StorageFull, and nothing is taken.
  void Reserve(size_t begin, size_t end) const;
  // Gives whole pages within [begin, end) back to the system; what they held is lost. Nothing happens to memory of the
  // heap, which is little.
  void Discard(size_t begin, size_t end) const;

  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void Swap(ZeroedBlock& other) noexcept;

  enum class Origin { kHeap, kMapping, kFile, kMemkind };

  char* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;  // bytes to unmap
  Origin origin_ = Origin::kHeap;
  std::shared_ptr<FileSpace> space_;
};

// 64-byte aligned, uninitialised buffers for results. Freed ones are kept for the next batch (up to a limit), since
// mapping fresh pages costs as much as filling them.
void* AcquireBuffer(size_t bytes);
void ReleaseBuffer(void* buffer);

}  // namespace deeprec
