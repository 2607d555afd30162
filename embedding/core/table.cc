#include "table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "maintenance.h"
#include "table_internal.h"

namespace deeprec {
namespace {

// Zeros that forked children see change.
std::shared_ptr<std::atomic<uint64_t>[]> MakeSharedCounters() {
  using Counter = std::atomic<uint64_t>;
  void* data = mmap(nullptr, kShards * sizeof(Counter), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<Counter*>(data), [](Counter* counters) { munmap(counters, kShards * sizeof(Counter)); }};
}

}  // namespace

Table::Table(const TableConfig& config)
    : config_(config),
      slot_count_(config.optimizer.slots().size()),
      filters_(config.admission.kind != AdmissionConfig::Kind::kAll) {
  const size_t blocks = config.block.blocks;
  if (config.dim == 0) throw std::invalid_argument("A table's dimension must be at least 1. Received: dim=0");
  if (blocks < 1 || blocks > 16 || config.dim % blocks != 0) {
    throw std::invalid_argument("A dimension grows in 1 to 16 equal blocks. Received: dim=" +
                                std::to_string(config.dim) + ", blocks=" + std::to_string(blocks));
  }
  if (config.tiers.size() > 4) throw std::invalid_argument("There are at most four tiers.");
  tiered_ = config.tiers.size() > 1;
  int words = 1;
  if (has_time()) time_word_ = words++;
  if (config.block.by_rank) {
    rank_word_ = words;
    words += 2;
  }
  if (tiered_) access_word_ = words++;
  for (size_t block = 1; block <= blocks; ++block) {
    classes_.push_back(RowLayout::Make(config.dim / blocks * block, config.value_type, config.optimizer.slots(),
                                       static_cast<size_t>(words)));
  }
  if (config.block.by_rank) {
    rank_thresholds_ = std::vector<std::atomic<uint64_t>>(blocks - 1);
    for (auto& threshold : rank_thresholds_) threshold.store(~uint64_t{0});
  }
  if (config.admission.kind == AdmissionConfig::Kind::kBloom) {
    bloom_ = std::make_unique<CountingBloom>(config.admission.counters, config.admission.hashes,
                                             config.admission.counter_bytes);
  }
  if (config_.tiers.empty()) config_.tiers.emplace_back();
  for (TierConfig& tier : config_.tiers) {
    if (tier.in_files()) tier.space = std::make_shared<FileSpace>(tier.path);
    kinds_.push_back(DescribeTier(tier));
    files_ = files_ || tier.in_files() || tier.kind == TierKind::kLevelDb;
  }
  if (files_) shared_writes_ = MakeSharedCounters();
  const TierConfig& top = config_.tiers[0];
  simple_ = blocks == 1 && config.value_type == ValueType::kFloat32 && !tiered_ && top.bytes == 0;
  shard_limit_ = top.bytes / kShards;
  size_t largest = classes_.back().stride + classes_.back().meta_words * sizeof(int64_t);
  if (top.in_files()) largest = blocks * ((largest + 4095) / 4096 * 4096 + 3 * size_t{4096});  // pages of every class
  if (top.bytes != 0 && shard_limit_ < largest) {
    throw std::invalid_argument("The first tier must have room for " + std::to_string(kShards) + " rows of " +
                                std::to_string(largest) +
                                " bytes. Received: storage_size=" + std::to_string(top.bytes));
  }
  for (int i = 0; i < kShards; ++i) {
    shards_.push_back(std::make_unique<Shard>());
    shards_.back()->number = static_cast<size_t>(i);
    for (const RowLayout& layout : classes_) shards_.back()->slabs.emplace_back(layout, top);
    for (size_t tier = 1; tier < config.tiers.size(); ++tier) {
      shards_.back()->lower.push_back(MakeTierStore(config_.tiers[tier], classes_));
    }
  }
  if (tiered_) RegisterForMaintenance(this);
}

Table::~Table() {
  if (tiered_) UnregisterFromMaintenance(this);
}

void Table::RequireOwner() const {
  if (!Inherited()) return;
  throw std::runtime_error(
      "The files of this table belong to the process that made it, and this one was forked off: it can only read. Make "
      "or restore a table of its own here.");
}

void Table::RequireUnchanged(const Shard& shard) const {
  if (!Inherited() || shared_writes_[shard.number].load() == shard.writes) return;
  throw std::runtime_error(
      "The process that made this table has changed its files since this one was forked off. Make or restore a table "
      "of its own here.");
}

size_t Table::Shard::FirstTierBytes() const {
  size_t bytes = 0;
  for (const RowSlabs& slab : slabs) bytes += slab.live() * slab.RowBytes();
  return bytes;
}

size_t Table::Shard::HeldBytes() const {
  size_t bytes = 0;
  for (const RowSlabs& slab : slabs) bytes += slab.bytes();
  return bytes;
}

void Table::DefaultRow(uint64_t hash, float* out) const {
  const size_t first = classes_[0].dim;
  if (filters_) {
    std::fill(out, out + config_.dim, config_.no_permission);
    return;
  }
  config_.initializer.Fill(hash, 0, first, out);
  if (config_.value_type == ValueType::kBFloat16) {
    for (size_t k = 0; k < first; ++k) out[k] = FromBFloat16(NearestBFloat16(out[k]));
  }
  std::fill(out + first, out + config_.dim, 0.0f);
}

void Table::ReadValue(const RowLayout& layout, const char* cell, float* out) const {
  if (config_.value_type == ValueType::kFloat32) {
    CopyRow(out, reinterpret_cast<const float*>(cell), layout.dim);
  } else {
    const auto* value = reinterpret_cast<const uint16_t*>(cell);
    for (size_t k = 0; k < layout.dim; ++k) out[k] = FromBFloat16(value[k]);
  }
  std::fill(out + layout.dim, out + config_.dim, 0.0f);
}

void Table::WriteValue(const Row& row, const float* value) const {
  if (config_.value_type == ValueType::kFloat32) {
    CopyRow(reinterpret_cast<float*>(row.cell), value, row.layout->dim);
  } else {
    auto* bits = reinterpret_cast<uint16_t*>(row.cell);
    for (size_t k = 0; k < row.layout->dim; ++k) bits[k] = NearestBFloat16(value[k]);
  }
}

void Table::FillStart(uint64_t hash, const Row& row, size_t begin) const {
  const size_t dim = row.layout->dim;
  if (config_.value_type == ValueType::kFloat32) {
    config_.initializer.Fill(hash, begin, dim, reinterpret_cast<float*>(row.cell) + begin);
  } else {
    std::vector<float>& start = ThreadScratch().start;
    start.resize(dim);
    config_.initializer.Fill(hash, begin, dim, start.data());
    auto* bits = reinterpret_cast<uint16_t*>(row.cell);
    for (size_t k = begin; k < dim; ++k) bits[k] = NearestBFloat16(start[k - begin]);
  }
  for (size_t s = 0; s < slot_count_; ++s) {
    const SlotSpec& spec = config_.optimizer.slots()[s];
    if (spec.scalar) {
      if (begin == 0) row.slot(s)[0] = spec.initial;
    } else {
      std::fill(row.slot(s) + begin, row.slot(s) + dim, spec.initial);
    }
  }
}

Table::Row Table::TopRow(const Shard& shard, const Entry& entry) const {
  const Address at = Unpack(entry.state);
  const RowSlabs& slabs = shard.slabs[at.row_class];
  return {slabs.Cell(at.place), slabs.Meta(at.place), &classes_[at.row_class]};
}

uint32_t Table::AllocateTop(Shard& shard, size_t row_class) {
  RowSlabs& slabs = shard.slabs[row_class];
  if (shard_limit_ != 0) MakeRoom(shard, row_class);
  const uint32_t place = slabs.Allocate();
  if (place >= kMaxPlace) {
    slabs.Free(place);
    throw StorageFull("A shard of the table holds its maximum of 2^26 rows; use more servers.");
  }
  return place;
}

Entry* Table::MakeRow(Shard& shard, Entry* entry, uint64_t hash, size_t row_class, bool fill) {
  const uint32_t place = AllocateTop(shard, row_class);
  if (entry == nullptr) {
    try {
      entry = Insert(shard, hash);
    } catch (...) {
      shard.slabs[row_class].Free(place);
      throw;
    }
  } else {
    --shard.filtered;
  }
  entry->state = Pack(0, row_class, place);
  ++shard.admitted;
  const Row row = TopRow(shard, *entry);
  if (fill) FillStart(hash, row, 0);
  std::fill(row.meta, row.meta + row.layout->meta_words, 0);
  row.meta[0] = kNeverUpdated;
  if (rank_word_ >= 0) SetRank(row.meta, 0, shard.rank_refreshes);
  Touch(shard, row.meta);
  return entry;
}

void Table::FreeRow(Shard& shard, const Entry& entry) {
  const Address at = Unpack(entry.state);
  if (at.tier == 0) {
    shard.slabs[at.row_class].Free(at.place);
  } else {
    Wrote(shard);
    shard.lower[at.tier - 1]->Erase(entry.hash, at.row_class, at.place);
  }
}

void Table::RemoveEntry(Shard& shard, Entry* entry) {
  shard.no_room = 0;
  if (entry->pending()) Preserve(shard, *entry);
  if (tracks_.load(std::memory_order_relaxed)) AddTombstone(shard, entry->hash);
  if (entry->has_row()) {
    FreeRow(shard, *entry);
  } else {
    --shard.filtered;
  }
  shard.index.Erase(entry);
}

size_t Table::WantedClass(const Entry& entry, const int64_t* meta) const {
  size_t wanted = 0;
  if (config_.block.by_rank) {
    uint64_t packed;
    std::memcpy(&packed, meta + rank_word_, sizeof(packed));
    const double decay = config_.block.decay;
    const double fresh = FreshFrequency(packed, entry.frequency());
    const double estimate =
        (decay * RankFrequency(packed) + (1 - decay) * fresh) / rank_correction_.load(std::memory_order_relaxed);
    const uint64_t rank = RankOf(estimate, entry.hash);
    while (wanted < rank_thresholds_.size() && rank >= rank_thresholds_[wanted].load(std::memory_order_relaxed)) {
      ++wanted;
    }
  } else {
    const auto& thresholds = config_.block.thresholds;
    while (wanted < thresholds.size() && entry.frequency() >= thresholds[wanted]) ++wanted;
  }
  return wanted;
}

void Table::Grow(Shard& shard, Entry* entry) {
  const int64_t* meta = rank_word_ < 0 ? nullptr : Peek(shard, *entry, &ThreadScratch().view).meta;
  const size_t wanted = WantedClass(*entry, meta);
  if (wanted > Unpack(entry->state).row_class) GrowTo(shard, entry, wanted);
}

void Table::MoveToClass(Shard& shard, Entry* entry, size_t row_class) {
  const uint32_t place = AllocateTop(shard, row_class);
  FreeRow(shard, *entry);
  entry->state = Pack(0, row_class, place);
}

void Table::GrowTo(Shard& shard, Entry* entry, size_t wanted) {
  const RowLayout& before = classes_[Unpack(entry->state).row_class];
  const uint64_t hash = entry->hash;
  // Making room may move this very row down; its content is copied first.
  std::vector<int64_t>& copy = ThreadScratch().row;
  CopyRecord(Peek(shard, *entry, &ThreadScratch().view), before, &copy);
  MoveToClass(shard, entry, wanted);
  const Row row = TopRow(shard, *entry);
  std::copy(copy.begin(), copy.begin() + static_cast<std::ptrdiff_t>(before.meta_words), row.meta);
  Touch(shard, row.meta);
  const char* cell = reinterpret_cast<const char*>(copy.data() + before.meta_words);
  const size_t width = config_.value_type == ValueType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
  FillStart(hash, row, before.dim);
  std::memcpy(row.cell, cell, before.dim * width);
  for (size_t s = 0; s < slot_count_; ++s) {
    std::memcpy(row.slot(s), cell + before.slot_offsets[s] * sizeof(float), before.slot_widths[s] * sizeof(float));
  }
}

void Table::Update(const Row& row, uint64_t hash, const float* gradient, const StepArgs& args, int64_t step,
                   int64_t now, float* scratch) const {
  const size_t dim = row.layout->dim;
  // A late update does not make a row older than it is.
  row.meta[0] = std::max(row.meta[0], step);
  if (time_word_ >= 0) row.meta[time_word_] = std::max(row.meta[time_word_], now);
  if (config_.optimizer.clips()) {
    std::copy(gradient, gradient + dim, scratch);
    config_.optimizer.Clip(scratch, dim);
    gradient = scratch;
  }
  float* slots[4] = {};
  for (size_t s = 0; s < slot_count_; ++s) slots[s] = row.slot(s);
  const Kernel kernel = config_.optimizer.kernel(true);
  if (config_.value_type == ValueType::kFloat32) {
    kernel(args, reinterpret_cast<float*>(row.cell), slots, gradient, dim);
    return;
  }
  // Rounding to the nearest would lose small updates for ever; rounding at random keeps them on average. The random
  // bits are a pure function of (key, step, element).
  auto* bits = reinterpret_cast<uint16_t*>(row.cell);
  float* wide = scratch + config_.dim;
  for (size_t k = 0; k < dim; ++k) wide[k] = FromBFloat16(bits[k]);
  kernel(args, wide, slots, gradient, dim);
  const uint64_t base = Mix64(hash ^ Mix64(static_cast<uint64_t>(step)));
  for (size_t k = 0; k < dim; ++k) {
    const uint64_t draw = Mix64(base + k / 4 + 1) >> (k % 4 * 16);
    bits[k] = ToBFloat16(wide[k], static_cast<uint32_t>(draw & 0xffff));
  }
}

}  // namespace deeprec
