// Rows on the move between tiers.
//
// Everything is computed on rows of the first tier. It is bounded: a row that needs a place there moves others down
// first, the least frequent or the least recently used ones; the background thread does so ahead of need.
#include <algorithm>
#include <exception>

#include "maintenance.h"
#include "table_internal.h"
#include "tier_mapped.h"

namespace deeprec {

void Table::Touch(Shard& shard, int64_t* meta) {
  if (access_word_ >= 0) meta[access_word_] = ++shard.clock;
}

RowView Table::Peek(const Shard& shard, const Entry& entry, std::vector<int64_t>* scratch) const {
  const Address at = Unpack(entry.state);
  if (at.tier == 0) {
    const Row row = TopRow(shard, entry);
    return {row.cell, row.meta};
  }
  return shard.lower[at.tier - 1]->View(entry.hash, at.row_class, at.place, scratch);
}

template <int kWrite>
void Table::PrefetchRow(const Shard& shard, const Entry& entry, size_t bytes) const {
  const Address at = Unpack(entry.state);
  if (at.tier == 0) {
    const RowSlabs& slabs = shard.slabs[at.row_class];
    PrefetchBytes<kWrite>(slabs.Cell(at.place), bytes);
    if (kWrite || (access_word_ >= 0 && config_.lru)) __builtin_prefetch(slabs.Meta(at.place), 1);
  } else {
    shard.lower[at.tier - 1]->Prefetch(at.row_class, at.place, bytes);
  }
}
template void Table::PrefetchRow<0>(const Shard&, const Entry&, size_t) const;
template void Table::PrefetchRow<1>(const Shard&, const Entry&, size_t) const;

Table::Row Table::Resident(Shard& shard, Entry* entry) {
  Address at = Unpack(entry->state);
  if (at.tier == 0) {
    const Row row = TopRow(shard, *entry);
    Touch(shard, row.meta);
    return row;
  }
  const RowLayout& layout = classes_[at.row_class];
  Scratch& scratch = ThreadScratch();
  const RowView view = Peek(shard, *entry, &scratch.view);
  scratch.row.resize((layout.cell_bytes + 7) / 8 + layout.meta_words);
  std::copy(view.meta, view.meta + layout.meta_words, scratch.row.begin());
  std::memcpy(scratch.row.data() + layout.meta_words, view.cell, layout.cell_bytes);
  const char* cell = reinterpret_cast<const char*>(scratch.row.data() + layout.meta_words);
  uint32_t place;
  try {
    place = AllocateTop(shard, at.row_class);
    at = Unpack(entry->state);  // making room may have moved this row one tier further down
    shard.lower[at.tier - 1]->Erase(entry->hash, at.row_class, at.place);
  } catch (const StorageFull&) {
    at = Unpack(entry->state);
    TierStore& below = *shard.lower[at.tier - 1];
    if (!below.reuses_places()) throw;
    // Everything is full: the row gives up its place to one that comes down, or takes it back.
    below.Erase(entry->hash, at.row_class, at.place);
    entry->state = kFiltered;
    try {
      place = AllocateTop(shard, at.row_class);
    } catch (...) {
      entry->state = Pack(at.tier, at.row_class, below.Put(entry->hash, at.row_class, cell, scratch.row.data()));
      throw;
    }
  }
  entry->state = Pack(0, at.row_class, place);
  const Row row = TopRow(shard, *entry);
  std::copy(scratch.row.begin(), scratch.row.begin() + static_cast<std::ptrdiff_t>(layout.meta_words), row.meta);
  std::memcpy(row.cell, cell, layout.cell_bytes);
  ++shard.promoted;
  Touch(shard, row.meta);
  return row;
}

RowView Table::ViewRow(Shard& shard, Entry* entry, std::vector<int64_t>* scratch) {
  const Address at = Unpack(entry->state);
  // A row that is less frequent than those that were moved down last would be the next to go: it is read below. Of
  // equally frequent ones the more recent deserves the place; every 16th hit claims it, which follows a change of load
  // without moving rows all the time.
  const bool deserves =
      at.tier == 0 || config_.lru || entry->frequency() > shard.cold_frequency ||
      (entry->frequency() == shard.cold_frequency && ++shard.clock % 16 == 0) ||
      shard.FirstTierBytes() + shard.slabs[at.row_class].RowBytes() <= shard_limit_ - shard_limit_ / 8;
  if (at.tier == 0 && !config_.lru) {
    // Accesses only break ties of frequencies; updates and moves note them.
    const Row row = TopRow(shard, *entry);
    return {row.cell, row.meta};
  }
  if (deserves) {
    try {
      const Row row = Resident(shard, entry);
      return {row.cell, row.meta};
    } catch (const StorageFull&) {
      // Reading needs no room: the row is read where it is.
    }
  }
  return Peek(shard, *entry, scratch);
}

bool Table::OverHighWater(const Shard& shard) const {
  return shard.FirstTierBytes() > shard_limit_ - shard_limit_ / 16;
}

void Table::MakeRoom(Shard& shard, size_t row_class) {
  const RowSlabs& slabs = shard.slabs[row_class];
  const size_t bytes = slabs.RowBytes();
  const auto fits = [&] { return slabs.has_free() || shard.HeldBytes() + bytes <= shard_limit_; };
  if (fits()) return;
  // Free cells belong to rows of other classes. Squeezing walks the index, so not for a few of them.
  if (shard.HeldBytes() - shard.FirstTierBytes() >= std::max(bytes, shard_limit_ / 32)) {
    Squeeze(shard, row_class);
    return;
  }
  if (shard.lower.empty()) {
    throw StorageFull(
        "The table's memory is full and it has no other tier: raise storage_size, evict, or add a tier. "
        "Received: storage_size=" +
        std::to_string(shard_limit_ * kShards));
  }
  Demote(shard, 0, std::max(bytes, shard_limit_ / 16));
  if (!fits()) Squeeze(shard, row_class);
  if (!fits()) ThrowFull(config_.tiers[1]);  // less went down than was wanted: there is no more room below
}

void Table::Squeeze(Shard& shard, size_t row_class) {
  // By class: the cells that its rows need, and the free ones among them.
  std::vector<uint32_t> needed;
  std::vector<std::vector<uint32_t>> holes(classes_.size());
  for (size_t other = 0; other < classes_.size(); ++other) {
    const RowSlabs& slabs = shard.slabs[other];
    needed.push_back(other == row_class ? std::numeric_limits<uint32_t>::max() : static_cast<uint32_t>(slabs.live()));
    for (const uint32_t cell : slabs.free_cells()) {
      if (cell < needed[other] && other != row_class) holes[other].push_back(cell);
    }
  }
  shard.index.ForEach([&](Entry* entry) {
    if (!entry->has_row()) return;
    const Address at = Unpack(entry->state);
    if (at.tier != 0 || at.place < needed[at.row_class]) return;
    const Row from = TopRow(shard, *entry);
    entry->state = Pack(0, at.row_class, holes[at.row_class].back());
    holes[at.row_class].pop_back();
    const Row to = TopRow(shard, *entry);
    std::memcpy(to.cell, from.cell, to.layout->cell_bytes);
    std::copy(from.meta, from.meta + from.layout->meta_words, to.meta);
  });
  for (size_t other = 0; other < classes_.size(); ++other) {
    if (other != row_class) shard.slabs[other].Truncate(needed[other]);
  }
}

void Table::Demote(Shard& shard, uint32_t tier, size_t bytes) {
  struct Victim {
    uint64_t major, minor;
    Entry* entry;
    bool operator<(const Victim& other) const {
      return major != other.major ? major < other.major : minor < other.minor;
    }
  };
  std::vector<Victim> victims;
  std::vector<int64_t> scratch;
  shard.index.ForEach([&](Entry* entry) {
    if (!entry->has_row() || Unpack(entry->state).tier != tier) return;
    const auto access = static_cast<uint64_t>(Peek(shard, *entry, &scratch).meta[access_word_]);
    victims.push_back(config_.lru ? Victim{access, 0, entry} : Victim{entry->frequency(), access, entry});
  });
  const size_t smallest = shard.slabs[0].RowBytes();
  const size_t wanted = std::min(victims.size(), bytes / smallest + 1);
  if (wanted < victims.size()) {
    std::nth_element(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(wanted), victims.end());
  }
  std::sort(victims.begin(), victims.begin() + static_cast<std::ptrdiff_t>(wanted));
  TierStore& target = *shard.lower[tier];
  size_t freed = 0;
  for (size_t i = 0; i < wanted && freed < bytes; ++i) {
    Entry* entry = victims[i].entry;
    const Address at = Unpack(entry->state);
    const RowView view = Peek(shard, *entry, &scratch);
    uint32_t place;
    try {
      place = target.Put(entry->hash, at.row_class, view.cell, view.meta);
    } catch (const StorageFull&) {
      if (target.Compact(Relocator(shard, tier + 1), /*force=*/true)) {
        --i;  // the same row again, in the space that compaction gave back
        continue;
      }
      if (tier + 1 < shard.lower.size()) {
        Demote(shard, tier + 1, std::max<size_t>(bytes - freed, 64 * 1024));
        const RowView again = Peek(shard, *entry, &scratch);
        place = target.Put(entry->hash, at.row_class, again.cell, again.meta);
      } else if (freed > 0) {
        break;  // some room was made; the caller sees whether it is enough
      } else {
        throw;
      }
    }
    FreeRow(shard, *entry);
    entry->state = Pack(tier + 1, at.row_class, place);
    freed += shard.slabs[at.row_class].RowBytes();
    ++shard.demoted;
    if (tier == 0) shard.cold_frequency = std::max(shard.cold_frequency, entry->frequency());
  }
}

TierStore::Moved Table::Relocator(Shard& shard, uint32_t tier) {
  return [&shard, tier](uint64_t hash, size_t row_class, uint32_t from, uint32_t to) {
    Entry* entry = shard.index.Find(hash);
    if (entry != nullptr && entry->state == Pack(tier, row_class, from)) entry->state = Pack(tier, row_class, to);
  };
}

bool Table::Maintain() {
  bool worked = false;
  std::exception_ptr error;
  for (auto& owned : shards_) {
    Shard& shard = *owned;
    std::unique_lock<std::shared_mutex> lock(shard.mutex);
    try {
      for (uint32_t tier = 1; tier <= shard.lower.size(); ++tier) {
        worked = shard.lower[tier - 1]->Compact(Relocator(shard, tier), /*force=*/false) || worked;
      }
      if (!shard.lower.empty() && OverHighWater(shard)) {
        shard.cold_frequency = 0;
        Demote(shard, 0, shard.FirstTierBytes() - (shard_limit_ - shard_limit_ / 8));
        worked = true;
      }
    } catch (...) {
      if (!error) error = std::current_exception();  // the other shards have their turn first
    }
  }
  if (error) std::rethrow_exception(error);
  return worked;
}

void Table::MaintainInBackground() {
  std::string error;
  try {
    Maintain();
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  std::lock_guard<std::mutex> lock(error_mutex_);
  background_error_ = error;
}

}  // namespace deeprec
