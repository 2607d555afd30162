// Lower storage tiers: where rows go that the first tier has no room for.
//
// One TierStore holds the rows of one shard and is used under that shard's lock: View with the lock shared, everything
// else with the lock held alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "file_space.h"
#include "layout.h"
#include "memory.h"

namespace deeprec {

enum class TierKind { kDram, kPmemFile, kPmemMemkind, kSsd, kLevelDb };
const char* TierName(TierKind kind);  // as in a storage_type

struct TierConfig {
  TierKind kind = TierKind::kDram;
  uint64_t bytes = 0;                  // hard limit, divided among the shards; 0 is none
  std::string path;                    // directory; empty where the kind needs none
  int node = 0;                        // NUMA node of kPmemMemkind; -1 for all that memkind takes for persistent memory
  std::shared_ptr<FileSpace> space{};  // of kinds in files; the table makes it

  bool in_files() const { return kind == TierKind::kPmemFile || kind == TierKind::kSsd; }
};

// A row where it lies; valid until the tier changes.
struct RowView {
  const char* cell;
  const int64_t* meta;
};

class TierStore {
 public:
  virtual ~TierStore() = default;
  // Stores a row of a class and returns its handle, below 2^26. Throws StorageFull (or std::runtime_error for an I/O
  // error) without changing anything.
  virtual uint32_t Put(uint64_t hash, size_t row_class, const char* cell, const int64_t* meta) = 0;
  // `scratch` may be used to hold the row.
  virtual RowView View(uint64_t hash, size_t row_class, uint32_t handle, std::vector<int64_t>* scratch) const = 0;
  virtual void Prefetch(size_t row_class, uint32_t handle, size_t bytes) const = 0;
  // Frees the place of a row; never throws.
  virtual void Erase(uint64_t hash, size_t row_class, uint32_t handle) = 0;
  // Lets `change` write to a row where it lies. Needs no room in the tier; throws StorageFull, the row as it was, where
  // a disk takes nothing.
  using Writer = std::function<void(char*, int64_t*)>;
  virtual void Change(uint64_t hash, size_t row_class, uint32_t handle, const Writer& change) = 0;
  // Puts another row of the class in the place of one, and returns its handle. As Change.
  virtual uint32_t Replace(uint64_t hash, size_t row_class, uint32_t handle, uint64_t other, const char* cell,
                           const int64_t* meta) = 0;
  virtual void Clear() = 0;
  // Moves rows together where much is dead (or, with `force`, anything); calls moved(hash, class, old handle, new
  // handle) for each. Returns whether anything was moved.
  using Moved = std::function<void(uint64_t, size_t, uint32_t, uint32_t)>;
  virtual bool Compact(const Moved& moved, bool force) = 0;
  // Whether much space is held without need: Compact has work to do.
  virtual bool wants_compaction() const { return false; }
  virtual size_t rows() const = 0;
  virtual size_t bytes() const = 0;
};

// One shard's share of a tier; `config` and `classes` must outlive it. Throws std::invalid_argument for a kind that
// the machine lacks (naming the package), a path that cannot be used, or a limit without room for anything.
std::unique_ptr<TierStore> MakeTierStore(const TierConfig& config, const std::vector<RowLayout>& classes);

// Zeroed memory of a tier that is memory to the CPU: DRAM, a mapped file, or a NUMA node.
ZeroedBlock MakeTierBlock(const TierConfig& config, size_t bytes);

// What the system granted for a tier, for statistics: "dram", "pmem (libpmem, MAP_SYNC)", "pmem (file)", "memkind (numa
// node 1)", "memkind (dax kmem)", "ssd log", "leveldb".
std::string DescribeTier(const TierConfig& config);

}  // namespace deeprec
