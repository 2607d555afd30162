// Whole-table work: upsert, erase, eviction, ranks, export, import, statistics.
#include <algorithm>
#include <cmath>

#include "bucket_order.h"
#include "table_internal.h"
#include "thread_pool.h"

namespace deeprec {
namespace {

double Norm(const std::vector<float>& values) {
  double square = 0;
  for (const float value : values) square += static_cast<double>(value) * value;
  return std::sqrt(square);
}

int64_t TierRows(const TableStats& stats) {
  int64_t rows = 0;
  for (const TierStats& tier : stats.tiers) rows += tier.rows;
  return rows;
}

}  // namespace

void Table::Upsert(const KeySpan& keys, const float* values) {
  ForEachShardOf(keys, [&](Shard& shard, const Item* items, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      Entry* entry = shard.index.Find(items[i].hash);
      const size_t full = classes_.size() - 1;
      if (entry != nullptr) Changing(shard, entry);
      if (entry == nullptr || !entry->has_row()) {
        entry = MakeRow(shard, entry, items[i].hash, full);
      } else if (Unpack(entry->state).row_class != full) {
        GrowTo(shard, entry, full);
      }
      CatchUp(shard, *entry);
      entry->set_frequency(std::max(entry->frequency(), config_.admission.threshold));
      Edit(shard, entry, [&](const Row& row) { WriteValue(row, values + items[i].position * config_.dim); });
    }
  });
}

size_t Table::Erase(const KeySpan& keys) {
  std::atomic<size_t> erased{0};
  ForEachShardOf(keys, [&](Shard& shard, const Item* items, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      Entry* entry = shard.index.Find(items[i].hash);
      if (entry == nullptr) continue;
      RemoveEntry(shard, entry);
      erased.fetch_add(1, std::memory_order_relaxed);
    }
    RequestCompaction(shard);
  });
  return erased.load();
}

std::vector<int64_t> Table::Evict(int64_t step, int64_t now) {
  const EvictionConfig& rules = config_.eviction;
  if (!rules.any()) return {};
  std::vector<std::vector<uint64_t>> evicted(kShards);
  ParallelFor(kShards, [&](size_t s) {
    Shard& shard = *shards_[s];
    std::unique_lock<std::shared_mutex> lock(shard.mutex);
    Mutating(shard);
    std::vector<int64_t> scratch;
    std::vector<float> value(config_.dim);
    std::vector<Entry*> stamp;
    shard.index.ForEach([&](Entry* entry) {
      if (!entry->has_row()) return;
      RowView view;
      try {
        view = Peek(shard, *entry, &scratch);
      } catch (const std::runtime_error& error) {
        Note(error);  // a disk that fails: the row stays
        return;
      }
      bool gone = false;
      const int64_t version = view.meta[0];
      const int64_t time = time_word_ < 0 ? 0 : view.meta[time_word_];
      if (rules.steps_to_live >= 0 && version != kNeverUpdated) gone = step - version > rules.steps_to_live;
      if (rules.seconds_to_live >= 0 && time != 0) gone = gone || now - time > rules.seconds_to_live;
      if (!gone && rules.l2_threshold > 0) {
        ReadValue(classes_[Unpack(entry->state).row_class], view.cell, value.data());
        gone = Norm(value) < rules.l2_threshold;
      }
      if (gone) {
        evicted[s].push_back(entry->hash);
        RemoveEntry(shard, entry);
      } else if ((rules.steps_to_live >= 0 && version == kNeverUpdated) || (rules.seconds_to_live >= 0 && time == 0)) {
        stamp.push_back(entry);
      }
    });
    // A row that was never updated starts to age now, where it is; one that a failing disk does not take, next time.
    for (Entry* entry : stamp) {
      try {
        Changing(shard, entry);
        EditInPlace(shard, *entry, [&](const Row& row) {
          if (rules.steps_to_live >= 0 && row.meta[0] == kNeverUpdated) row.meta[0] = step;
          if (rules.seconds_to_live >= 0 && row.meta[time_word_] == 0) row.meta[time_word_] = now;
        });
      } catch (const std::runtime_error& error) {
        Note(error);
      }
    }
    shard.evicted += static_cast<int64_t>(evicted[s].size());
    RequestCompaction(shard);
  });
  std::vector<int64_t> keys;
  for (const uint64_t hash : InBucketOrder(&evicted)) keys.push_back(static_cast<int64_t>(Unmix64(hash)));
  return keys;
}

void Table::Clear() {
  std::lock_guard<std::mutex> ranks(rank_mutex_);
  rank_refreshes_ = 0;
  rank_correction_.store(1);
  for (auto& threshold : rank_thresholds_) threshold.store(~uint64_t{0});
  for (auto& shard : shards_) {
    std::unique_lock<std::shared_mutex> lock(shard->mutex);
    Mutating(*shard);
    Wrote(*shard);
    shard->index.ForEach([&](const Entry* entry) {
      if (entry->pending()) Preserve(*shard, *entry);
    });
    shard->tombstones_lost = tracks_.load();
    shard->no_room = 0;
    shard->rank_refreshes = 0;
    shard->ranks_behind = false;
    shard->index.Clear();
    for (RowSlabs& slab : shard->slabs) slab.Clear();
    for (auto& tier : shard->lower) tier->Clear();
    shard->tombstones.clear();
    shard->filtered = shard->refused = 0;
  }
  if (bloom_) {
    for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
      Shard& shard = *shards_[bucket & (kShards - 1)];
      std::unique_lock<std::shared_mutex> lock(shard.mutex);
      BloomChanging(shard, bucket);
      bloom_->Clear(bucket);
    }
  }
}

void Table::CopyBloom(int bucket, char* counters, bool in) {
  Shard& shard = *shards_[bucket & (kShards - 1)];
  std::unique_lock<std::shared_mutex> lock(shard.mutex);
  char* data = bloom_->bucket_data(bucket);
  if (in) {
    BloomChanging(shard, bucket);
    std::memcpy(data, counters, bloom_->bucket_bytes());
    bloom_->Recount(bucket);
  } else {
    std::memcpy(counters, data, bloom_->bucket_bytes());
  }
}

uint64_t Table::RankAfter(const int64_t* meta, uint32_t frequency, int64_t refreshes) const {
  const double decay = config_.block.decay;
  auto packed = static_cast<uint64_t>(meta[rank_word_]);
  for (int64_t at = meta[rank_word_ + 1]; at < refreshes; ++at) {
    const auto taken =
        static_cast<float>(decay * RankFrequency(packed) + (1 - decay) * FreshFrequency(packed, frequency));
    const uint64_t next = PackRank(taken, frequency);
    if (next == packed) break;  // it stays so
    packed = next;
  }
  return packed;
}

void Table::SetRank(int64_t* meta, uint64_t packed, int64_t refreshes) const {
  meta[rank_word_] = static_cast<int64_t>(packed);
  meta[rank_word_ + 1] = refreshes;
}

void Table::CatchUp(Shard& shard, const Entry& entry) {
  if (!shard.ranks_behind) return;
  const int64_t* meta = Peek(shard, entry, &ThreadScratch().view).meta;
  if (meta[rank_word_ + 1] >= shard.rank_refreshes) return;
  const uint64_t packed = RankAfter(meta, entry.frequency(), shard.rank_refreshes);
  EditInPlace(shard, entry, [&](const Row& row) { SetRank(row.meta, packed, shard.rank_refreshes); });
}

void Table::RefreshRanks() {
  if (!config_.block.by_rank) return;
  std::lock_guard<std::mutex> only(rank_mutex_);
  ++rank_refreshes_;
  FindThresholds(/*refresh=*/true);
}

void Table::Ranks(int64_t* refreshes, std::vector<uint64_t>* thresholds) {
  std::lock_guard<std::mutex> only(rank_mutex_);
  *refreshes = rank_refreshes_;
  thresholds->clear();
  for (const auto& threshold : rank_thresholds_) thresholds->push_back(threshold.load());
}

void Table::SetRanks(int64_t refreshes, const std::vector<uint64_t>& thresholds) {
  if (!config_.block.by_rank) return;
  if (refreshes < 0 || (!thresholds.empty() && thresholds.size() != rank_thresholds_.size())) {
    throw std::invalid_argument(
        "Ranks have one threshold for each block but the first. Received: " + std::to_string(thresholds.size()) +
        " thresholds, refreshes=" + std::to_string(refreshes));
  }
  std::lock_guard<std::mutex> only(rank_mutex_);
  rank_refreshes_ = refreshes;
  for (auto& shard : shards_) {
    std::unique_lock<std::shared_mutex> lock(shard->mutex);
    shard->rank_refreshes = refreshes;
    shard->ranks_behind = true;
  }
  rank_correction_.store(RankCorrection());
  if (thresholds.empty() && refreshes > 0) FindThresholds(/*refresh=*/false);
  for (size_t k = 0; k < rank_thresholds_.size(); ++k) {
    if (thresholds.empty() && refreshes == 0) rank_thresholds_[k].store(~uint64_t{0});
    if (!thresholds.empty()) rank_thresholds_[k].store(thresholds[k]);
  }
}

float Table::RankCorrection() const {
  if (rank_refreshes_ == 0) return 1;
  return static_cast<float>(1 - std::pow(config_.block.decay, static_cast<double>(rank_refreshes_ + 1)));
}

// DeepRec's rule: of n blocks, block k goes to the (p^(n+1-k) - 1) / (p^(n+1) - 1) most frequent part of the keys.
// Under rank_mutex_.
void Table::FindThresholds(bool refresh) {
  const double decay = config_.block.decay;
  const double correction = 1 - std::pow(decay, static_cast<double>(rank_refreshes_));
  std::vector<uint64_t> ranks;
  for (auto& shard : shards_) {
    std::unique_lock<std::shared_mutex> lock(shard->mutex);
    if (refresh) {
      Mutating(*shard);
      shard->rank_refreshes = rank_refreshes_;
      shard->ranks_behind = false;
    }
    shard->index.ForEach([&](const Entry* entry) {
      if (!entry->has_row()) return;
      uint64_t packed = 0;
      try {
        if (refresh && !entry->pending()) {
          EditInPlace(*shard, *entry, [&](const Row& row) {
            packed = RankAfter(row.meta, entry->frequency(), rank_refreshes_);
            SetRank(row.meta, packed, std::max(row.meta[rank_word_ + 1], rank_refreshes_));
          });
        } else {  // a snapshot has yet to read the row as it is
          shard->ranks_behind = true;
          packed = RankAfter(Peek(*shard, *entry, &ThreadScratch().view).meta, entry->frequency(), rank_refreshes_);
        }
      } catch (const std::runtime_error& error) {
        shard->ranks_behind = true;
        Note(error);  // a disk that fails: the row takes its occurrences in when it occurs again
        return;
      }
      const auto taken = static_cast<float>(RankFrequency(packed));
      if (taken > 1e-6f) ranks.push_back(RankOf(taken / correction, entry->hash));
    });
  }
  std::sort(ranks.begin(), ranks.end(), std::greater<uint64_t>());
  const double base = config_.block.rank_base;
  const auto blocks = static_cast<double>(config_.block.blocks);
  for (size_t k = 2; k <= config_.block.blocks; ++k) {
    const double share = (std::pow(base, blocks + 1 - static_cast<double>(k)) - 1) / (std::pow(base, blocks + 1) - 1);
    const auto rank = static_cast<size_t>(share * static_cast<double>(ranks.size()));
    rank_thresholds_[k - 2].store(rank == 0 ? ~uint64_t{0} : ranks[rank - 1]);
  }
  rank_correction_.store(RankCorrection());
}

void Table::Keys(std::vector<int64_t>* rows, std::vector<int64_t>* filtered, std::vector<int64_t>* counts) {
  std::vector<std::vector<HashedCount>> with_row(kShards), without_row(kShards);
  ParallelFor(kShards, [&](size_t s) {
    std::shared_lock<std::shared_mutex> lock(shards_[s]->mutex);
    shards_[s]->index.ForEach([&](const Entry* entry) {
      (entry->has_row() ? with_row : without_row)[s].push_back({entry->hash, entry->frequency()});
    });
  });
  SplitCounts(InBucketOrder(&with_row), rows, nullptr);
  SplitCounts(InBucketOrder(&without_row), filtered, counts);
}

void Table::FillColumns(const RowView& view, size_t row_class, uint32_t frequency, size_t to,
                        const RowColumns& columns) const {
  const RowLayout& layout = classes_[row_class];
  if (columns.frequency != nullptr) columns.frequency[to] = frequency;
  if (columns.version != nullptr) columns.version[to] = view.meta[0];
  if (columns.time != nullptr && time_word_ >= 0) columns.time[to] = view.meta[time_word_];
  if (columns.blocks != nullptr) columns.blocks[to] = static_cast<int64_t>(row_class) + 1;
  if (columns.rank != nullptr && rank_word_ >= 0) {
    columns.rank[to] = view.meta[rank_word_];
    columns.rank_refresh[to] = view.meta[rank_word_ + 1];
  }
  if (columns.value != nullptr) ReadValue(layout, view.cell, columns.value + to * config_.dim);
  for (size_t s = 0; s < columns.slots.size(); ++s) {
    const size_t width = slot_width(s);
    float* slot = columns.slots[s] + to * width;
    const float* from = reinterpret_cast<const float*>(view.cell) + layout.slot_offsets[s];
    CopyRow(slot, from, layout.slot_widths[s]);
    std::fill(slot + layout.slot_widths[s], slot + width, config_.optimizer.slots()[s].initial);
  }
}

void Table::Export(const KeySpan& keys, uint8_t* present, const RowColumns& columns) {
  ForEachGroup(GroupByShard({keys}), [&](size_t, int shard_index, const Item* items, size_t n, bool wait) {
    Shard& shard = *shards_[shard_index];
    std::shared_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
    if (!Take(lock, wait)) return false;
    std::vector<int64_t>& scratch = ThreadScratch().view;
    for (size_t i = 0; i < n; ++i) {
      const size_t to = items[i].position;
      const Entry* entry = shard.index.Find(items[i].hash);
      present[to] = entry != nullptr && entry->has_row();
      if (!present[to]) continue;
      const size_t row_class = Unpack(entry->state).row_class;
      FillColumns(Peek(shard, *entry, &scratch), row_class, entry->frequency(), to, columns);
    }
    RequireUnchanged(shard);
    return true;
  });
}

void Table::Reserve(size_t rows) {
  // Shards get their share of keys give or take a few standard deviations.
  const double share = static_cast<double>(rows) / kShards;
  const auto entries = static_cast<size_t>(share + 4 * std::sqrt(share));
  ParallelFor(kShards, [&](size_t s) {
    std::unique_lock<std::shared_mutex> lock(shards_[s]->mutex);
    shards_[s]->index.Reserve(entries);
  });
}

void Table::Import(const KeySpan& keys, const RowColumns& columns) {
  const size_t dim = config_.dim;
  ForEachShardOf(keys, [&](Shard& shard, const Item* items, size_t n) {
    for (size_t step = 0; step < n + kDistance; ++step) {
      if (step < n) shard.index.Prefetch(items[step].hash);
      if (step < kDistance) continue;
      const Item& item = items[step - kDistance];
      const size_t from = item.position;
      const size_t last = classes_.size() - 1;
      const size_t row_class =
          columns.blocks == nullptr ? last : std::min<size_t>(last, static_cast<size_t>(columns.blocks[from] - 1));
      Entry* entry = shard.index.Find(item.hash);
      if (entry != nullptr) Changing(shard, entry);
      if (entry == nullptr || !entry->has_row()) {
        entry = MakeRow(shard, entry, item.hash, row_class, /*fill=*/false);
      } else if (Unpack(entry->state).row_class != row_class) {
        MoveToClass(shard, entry, row_class);
      }
      const int64_t frequency = std::clamp<int64_t>(columns.frequency[from], 0, kMaxFrequency);
      // A row that was admitted once stays admitted, also under a higher threshold.
      entry->set_frequency(std::max(static_cast<uint32_t>(frequency), config_.admission.threshold));
      Edit(shard, entry, [&](const Row& row) {
        row.meta[0] = columns.version[from];
        if (time_word_ >= 0) row.meta[time_word_] = columns.time == nullptr ? 0 : columns.time[from];
        if (rank_word_ >= 0 && columns.rank != nullptr && columns.rank_refresh != nullptr) {
          SetRank(row.meta, static_cast<uint64_t>(columns.rank[from]), columns.rank_refresh[from]);
          shard.ranks_behind = true;
        } else if (rank_word_ >= 0) {
          SetRank(row.meta, 0, shard.rank_refreshes);  // as in a new row
        }
        WriteValue(row, columns.value + from * dim);
        for (size_t s = 0; s < slot_count_; ++s) {
          CopyRow(row.slot(s), columns.slots[s] + from * slot_width(s), row.layout->slot_widths[s]);
        }
      });
    }
  });
}

void Table::ImportFiltered(const KeySpan& keys) {
  ForEachShardOf(keys, [&](Shard& shard, const Item* items, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      if (bloom_) {
        BloomChanging(shard, BucketOf(items[i].hash));
        bloom_->Add(items[i].hash, items[i].count);
        continue;
      }
      Entry* entry = shard.index.Find(items[i].hash);
      if (entry == nullptr) {
        entry = Insert(shard, items[i].hash);
        entry->state = kFiltered;
        ++shard.filtered;
      }
      if (entry->has_row()) continue;
      Changing(shard, entry);
      entry->set_frequency(items[i].count);
    }
  });
}

TableStats Table::Stats() const {
  TableStats stats;
  stats.tiers.resize(config_.tiers.size());
  for (size_t tier = 0; tier < config_.tiers.size(); ++tier) stats.tiers[tier].kind = kinds_[tier];
  int64_t index_bytes = bloom_ ? static_cast<int64_t>(bloom_->bytes()) : 0;
  for (int s = 0; s < kShards; ++s) {
    const auto& shard = shards_[s];
    std::shared_lock<std::shared_mutex> lock(shard->mutex);
    const int64_t rows_before = TierRows(stats);
    for (const RowSlabs& slab : shard->slabs) {
      stats.tiers[0].rows += static_cast<int64_t>(slab.live());
      stats.tiers[0].bytes += static_cast<int64_t>(slab.bytes());
      index_bytes += static_cast<int64_t>(slab.list_bytes());
    }
    for (size_t tier = 0; tier < shard->lower.size(); ++tier) {
      stats.tiers[tier + 1].rows += static_cast<int64_t>(shard->lower[tier]->rows());
      stats.tiers[tier + 1].bytes += static_cast<int64_t>(shard->lower[tier]->bytes());
    }
    index_bytes += static_cast<int64_t>(shard->index.bytes());
    stats.filtered += shard->filtered + shard->refused;
    if (bloom_) {
      double counted = 0;
      for (int bucket = s; bucket < kNumBuckets; bucket += kShards) counted += bloom_->EstimateKeys(bucket);
      stats.filtered += std::max<int64_t>(0, std::llround(counted) - (TierRows(stats) - rows_before));
    }
    stats.admitted += shard->admitted;
    stats.evicted += shard->evicted;
    stats.dropped += shard->dropped;
    stats.promoted += shard->promoted;
    stats.demoted += shard->demoted;
    stats.lookups += shard->lookups.load(std::memory_order_relaxed);
    stats.hits += shard->hits.load(std::memory_order_relaxed);
  }
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    stats.background_error = background_error_;
  }
  stats.bytes = index_bytes;
  for (const TierStats& tier : stats.tiers) {
    stats.rows += tier.rows;
    stats.bytes += tier.bytes;
  }
  return stats;
}

}  // namespace deeprec
