#include "tier.h"

#include <algorithm>

#include "batch.h"
#include "tier_chunks.h"
#include "tier_leveldb.h"

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
  if (config.kind == TierKind::kLevelDb) return MakeLevelDbTier(config, classes);
  return std::make_unique<ChunkTier>(config, classes);
}

ZeroedBlock MakeTierBlock(const TierConfig& config, size_t bytes) {
  switch (config.kind) {
    case TierKind::kDram:
      return ZeroedBlock(bytes);
    case TierKind::kPmemMemkind:
      return ZeroedBlock::OnNodes(config.node, bytes);
    default:
      return ZeroedBlock::InFile(config.space, bytes);
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
  return "pmem (" + FileSpace::Describe(config.path) + ")";
}

size_t ChunkBytes(const TierConfig& config, const std::vector<RowLayout>& classes) {
  // Small pieces waste little, and hold little that another shard or class could use; but no file system likes to be
  // asked for every row.
  const uint64_t unlimited = (uint64_t{32} << 10) / classes.size(), most = (uint64_t{256} << 10) / classes.size();
  const RowLayout& largest = classes.back();
  const uint64_t row = largest.stride + (largest.meta_words + 1) * sizeof(int64_t);
  const auto pages = [](uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  const uint64_t least = pages(row + 16), efficient = pages(8 * row);
  if (config.bytes == 0) return std::max(pages(unlimited), efficient);
  // A chunk for each class, and one more for compaction.
  const uint64_t needed = (classes.size() + 1) * least;
  if (config.bytes / kShards < needed) {
    throw std::invalid_argument("A tier must have room for " + std::to_string(kShards * needed) +
                                " bytes. Received: storage_size=" + std::to_string(config.bytes));
  }
  const uint64_t quarter = config.bytes / kShards / (4 * classes.size()) / 4096 * 4096;
  return std::max(least, std::min(quarter, std::max(pages(most), efficient)));
}

[[noreturn]] void ThrowFull(const TierConfig& config) {
  throw StorageFull(
      std::string("The ") + TierName(config.kind) +
      " tier is full: raise its storage_size, or evict. Received: storage_size=" + std::to_string(config.bytes));
}

}  // namespace deeprec
