// Space on a disk that is mapped: one tier's rows in files without names. Address space comes in large pieces, disk
// space page by page, and both go back.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace deeprec {

// How many times this process was forked off, at any depth: what it inherited with files has a smaller number.
unsigned ForkGeneration();

// Safe to use from several threads at once. A forked child must neither write to what it inherited nor take anything
// more: it shares the files with its parent.
class FileSpace {
 public:
  explicit FileSpace(std::string directory) : directory_(std::move(directory)), generation_(ForkGeneration()) {}
  FileSpace(const FileSpace&) = delete;
  FileSpace& operator=(const FileSpace&) = delete;
  ~FileSpace();

  // Address space of whole pages, without space on the disk. Throws std::invalid_argument for a directory that cannot
  // be used, StorageFull where not even a file has room.
  char* Allocate(size_t bytes);
  // Gives all of it back.
  void Free(char* data, size_t bytes);
  // Takes space on the disk for whole pages, so that writing to them cannot meet a full disk. Throws StorageFull.
  void Reserve(char* data, size_t bytes);
  // Gives the space of whole pages back; what they held is lost.
  void Discard(char* data, size_t bytes);

  // What a directory grants: "libpmem, " where that is installed, and "MAP_SYNC" (persistent memory) or "file".
  static std::string Describe(const std::string& directory);

 private:
  struct Extent {
    int file;
    char* data;
    size_t bytes, used;
    bool libpmem;
  };
  void AddExtent(size_t least);
  Extent Find(const char* data) const;

  const std::string directory_;
  const unsigned generation_;
  mutable std::mutex mutex_;
  std::vector<Extent> extents_;
  std::multimap<size_t, char*> free_;  // address space given back, by size
};

}  // namespace deeprec
