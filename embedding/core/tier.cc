#include "tier.h"

#include <algorithm>

#include "batch.h"
#include "tier_leveldb.h"
#include "tier_log.h"
#include "tier_mapped.h"

namespace deeprec {

const char* TierName(TierKind kind) {
  switch (kind) {
    case TierKind::kDram:
      return "DRAM";
    case TierKind::kPmemFile:
      return "PMEM_LIBPMEM";
    case TierKind::kPmemMemkind:
      return "PMEM_MEMKIND";
    case TierKind::kSsd:
      return "SSDHASH";
    case TierKind::kLevelDb:
      return "LEVELDB";
  }
  return "unknown";
}

std::unique_ptr<TierStore> MakeTierStore(const TierConfig& config, const std::vector<RowLayout>& classes) {
  switch (config.kind) {
    case TierKind::kSsd:
      return std::make_unique<LogTier>(config, classes);
    case TierKind::kLevelDb:
      return MakeLevelDbTier(config, classes);
    default:
      return std::make_unique<MappedTier>(config, classes);
  }
}

ZeroedBlock MakeTierBlock(const TierConfig& config, size_t bytes) {
  switch (config.kind) {
    case TierKind::kDram:
      return ZeroedBlock(bytes);
    case TierKind::kPmemMemkind:
      return ZeroedBlock::OnNodes(config.node, bytes);
    default:
      return ZeroedBlock::InFile(config.path, bytes);
  }
}

std::string DescribeTier(const TierConfig& config) {
  switch (config.kind) {
    case TierKind::kDram:
      return "dram";
    case TierKind::kPmemMemkind:
      return config.node < 0 ? "memkind (dax kmem)" : "memkind (numa node " + std::to_string(config.node) + ")";
    case TierKind::kSsd:
      return "ssd log";
    case TierKind::kLevelDb:
      return "leveldb";
    case TierKind::kPmemFile:
      break;
  }
  std::string granted;
  ZeroedBlock::InFile(config.path, 4096, &granted);
  return "pmem (" + granted + ")";
}

size_t ChunkBytes(const TierConfig& config, const std::vector<RowLayout>& classes) {
  // A few chunks for each shard and class fit a small limit; large ones keep the number of mappings small.
  const RowLayout& largest = classes.back();
  const uint64_t least = (largest.stride + (largest.meta_words + 2) * sizeof(int64_t) + 4095) / 4096 * 4096;
  if (config.bytes == 0) return std::max<uint64_t>(uint64_t{1} << 20, least);
  if (config.bytes / kShards < least) {
    throw std::invalid_argument("A tier must have room for " + std::to_string(kShards * least) +
                                " bytes. Received: storage_size=" + std::to_string(config.bytes));
  }
  const uint64_t quarter = std::min<uint64_t>(config.bytes / kShards / (4 * classes.size()), uint64_t{8} << 20);
  return std::max<uint64_t>(quarter / 4096 * 4096, least);
}

[[noreturn]] void ThrowFull(const TierConfig& config) {
  throw StorageFull(
      std::string("The ") + TierName(config.kind) +
      " tier is full: raise its storage_size, or evict. Received: storage_size=" + std::to_string(config.bytes));
}

}  // namespace deeprec
