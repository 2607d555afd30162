// Aligned memory: zeroed pages for tables, with huge pages where the system grants them, and pooled output buffers.
#pragma once

#include <cstddef>

namespace deeprec {

// Zeroed, 64-byte aligned memory; large blocks are mapped, advised to use huge pages, and cost nothing until touched.
class ZeroedBlock {
 public:
  ZeroedBlock() = default;
  explicit ZeroedBlock(size_t bytes);
  ZeroedBlock(ZeroedBlock&& other) noexcept { Swap(other); }
  ZeroedBlock& operator=(ZeroedBlock&& other) noexcept {
    Swap(other);
    return *this;
  }
  ~ZeroedBlock();

  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void Swap(ZeroedBlock& other) noexcept;

  char* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;  // bytes to unmap; 0 when the block came from the heap
};

// 64-byte aligned, uninitialised buffers for results. Freed ones are kept for the next batch (up to a limit), since
// mapping fresh pages costs as much as filling them.
void* AcquireBuffer(size_t bytes);
void ReleaseBuffer(void* buffer);

}  // namespace deeprec
