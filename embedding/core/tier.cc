#include "tier.h"

#include "tier_leveldb.h"
#include "tier_log.h"
#include "tier_mapped.h"

namespace deeprec {

std::unique_ptr<TierStore> MakeTierStore(const TierConfig& config, const std::vector<RowLayout>& classes,
                                         const std::shared_ptr<Budget>& budget) {
  switch (config.kind) {
    case TierKind::kSsd:
      return std::make_unique<LogTier>(config, classes, budget);
    case TierKind::kLevelDb:
      return MakeLevelDbTier(config, classes, budget);
    default:
      return std::make_unique<MappedTier>(config, classes, budget);
  }
}

ZeroedBlock MakeTierBlock(const TierConfig& config, size_t bytes) {
  switch (config.kind) {
    case TierKind::kDram:
      return ZeroedBlock(bytes);
    case TierKind::kPmemMemkind:
      return ZeroedBlock::OnNode(config.node, bytes);
    default:
      return ZeroedBlock::InFile(config.path, bytes);
  }
}

std::string DescribeTier(const TierConfig& config) {
  switch (config.kind) {
    case TierKind::kDram:
      return "dram";
    case TierKind::kPmemMemkind:
      return "numa node " + std::to_string(config.node);
    case TierKind::kSsd:
      return "ssd log";
    case TierKind::kLevelDb:
      return "leveldb";
    case TierKind::kPmemFile:
      break;
  }
  bool synced = false;
  ZeroedBlock::InFile(config.path, 4096, &synced);
  return synced ? "pmem (MAP_SYNC)" : "pmem (file)";
}

size_t ChunkBytes(const Budget& budget, const std::vector<RowLayout>& classes) {
  // A few chunks for each shard fit a small limit; large ones keep the number of mappings small.
  const uint64_t limit = budget.limit();
  uint64_t bytes = limit == 0 ? uint64_t{1} << 20 : std::min<uint64_t>(limit / 256, uint64_t{8} << 20);
  const RowLayout& largest = classes.back();
  const uint64_t least = RecordBytes(largest);
  bytes = std::max<uint64_t>(bytes, least);
  return static_cast<size_t>((bytes + 4095) / 4096 * 4096);
}

}  // namespace deeprec
