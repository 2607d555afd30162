// libpmem and memkind, looked for at run time through their C interfaces: no build needs them, and a wheel runs without
// them. LevelDB is in tier_leveldb.cc.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace deeprec {

// Throw std::invalid_argument: naming the package if the library is not installed, or naming the node (see
// AllocateOnNodes) that the system does not give.
void RequireLibpmem();
void RequireMemkind(int node);

// Persistent memory through libpmem.
struct PmemMapping {
  char* data;
  size_t bytes;  // mapped
  bool is_pmem;  // the mount granted MAP_SYNC
};
// A file, grown to that size without space on the disk, mapped: null where libpmem is not installed. An error is in
// errno, with data == nullptr. Rows live as long as the process, so nothing is ever flushed to the medium.
std::optional<PmemMapping> MapPmem(const std::string& path, size_t bytes);
void UnmapPmem(char* data, size_t bytes);

// Memory of NUMA nodes through memkind, zeroed and 64-byte aligned. Node -1: all nodes that memkind takes for
// persistent memory, those of MEMKIND_DAX_KMEM_NODES or those that it finds. Throws std::invalid_argument for nodes
// that the system does not give, std::bad_alloc where they are full.
char* AllocateOnNodes(int node, size_t bytes);
void FreeOnNodes(char* data);

}  // namespace deeprec
