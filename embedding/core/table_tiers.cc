// Rows on the move between tiers.
//
// Everything is computed on rows of the first tier. It is bounded: a row that needs a place there moves others down
// first, the least frequent or the least recently used ones; the background thread does so ahead of need.
#include <algorithm>
#include <exception>

#include "maintenance.h"
#include "table_internal.h"
#include "tier_common.h"

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

template <RowUse kUse>
void Table::PrefetchRow(const Shard& shard, const Entry& entry, size_t bytes) const {
  const Address at = Unpack(entry.state);
  if (at.tier == 0) {
    const RowSlabs& slabs = shard.slabs[at.row_class];
    PrefetchBytes<kUse == RowUse::kUpdate ? 1 : 0>(slabs.Cell(at.place), bytes);
    if (kUse == RowUse::kCopy) {
      __builtin_prefetch(slabs.Meta(at.place), 0);
    } else if (kUse == RowUse::kUpdate || (access_word_ >= 0 && config_.lru)) {
      __builtin_prefetch(slabs.Meta(at.place), 1);
    }
  } else {
    shard.lower[at.tier - 1]->Prefetch(at.row_class, at.place, bytes);
  }
}
template void Table::PrefetchRow<RowUse::kLookup>(const Shard&, const Entry&, size_t) const;
template void Table::PrefetchRow<RowUse::kUpdate>(const Shard&, const Entry&, size_t) const;
template void Table::PrefetchRow<RowUse::kCopy>(const Shard&, const Entry&, size_t) const;

// Allocates first and commits after: where there is no room, everything is as it was.
bool Table::Promote(Shard& shard, Entry* entry) {
  Address at = Unpack(entry->state);
  if (at.tier == 0) return true;
  const RowLayout& layout = classes_[at.row_class];
  Scratch& scratch = ThreadScratch();
  CopyRecord(Peek(shard, *entry, &scratch.view), layout, &scratch.row);
  uint32_t place = kNoPlace;
  if (shard.no_room == 0) {
    try {
      place = AllocateTop(shard, at.row_class);
    } catch (const StorageFull&) {
      shard.no_room = 256;  // looking for room walks the shard: not for every row
    }
  } else {
    --shard.no_room;
  }
  if (place != kNoPlace) {
    Wrote(shard);
    at = Unpack(entry->state);  // making room may have moved this row one tier further down
    shard.lower[at.tier - 1]->Erase(entry->hash, at.row_class, at.place);
  } else {
    place = Exchange(shard, *entry);
    if (place == kNoPlace) return false;
  }
  entry->state = Pack(0, at.row_class, place);
  const Row row = TopRow(shard, *entry);
  std::copy(scratch.row.begin(), scratch.row.begin() + static_cast<std::ptrdiff_t>(layout.meta_words), row.meta);
  std::memcpy(row.cell, scratch.row.data() + layout.meta_words, layout.cell_bytes);
  ++shard.promoted;
  return true;
}

uint32_t Table::Exchange(Shard& shard, const Entry& entry) {
  const Address at = Unpack(entry.state);
  Entry* coldest = nullptr;
  uint64_t least = 0, access = 0;
  shard.index.VisitSome(Mix64(static_cast<uint64_t>(++shard.clock)), 64, [&](Entry* other) {
    if (!other->has_row()) return;
    const Address there = Unpack(other->state);
    if (there.tier != 0 || there.row_class != at.row_class) return;
    if (!config_.lru && other->frequency() > entry.frequency()) return;
    const auto minor = static_cast<uint64_t>(TopRow(shard, *other).meta[access_word_]);
    const uint64_t major = config_.lru ? 0 : other->frequency();
    if (coldest != nullptr && (major != least ? major > least : minor >= access)) return;
    coldest = other;
    least = major;
    access = minor;
  });
  if (coldest == nullptr) return kNoPlace;
  const Row row = TopRow(shard, *coldest);
  uint32_t below;
  Wrote(shard);
  try {
    below = shard.lower[at.tier - 1]->Replace(entry.hash, at.row_class, at.place, coldest->hash, row.cell, row.meta);
  } catch (const StorageFull&) {
    return kNoPlace;
  }
  const uint32_t place = Unpack(coldest->state).place;
  coldest->state = Pack(at.tier, at.row_class, below);
  ++shard.demoted;
  return place;
}

RowView Table::ViewRow(Shard& shard, Entry* entry, std::vector<int64_t>* scratch) {
  const Address at = Unpack(entry->state);
  if (at.tier == 0) {
    const Row row = TopRow(shard, *entry);
    // LFU: accesses only break ties of frequencies; updates and moves note them.
    if (config_.lru) Touch(shard, row.meta);
    return {row.cell, row.meta};
  }
  // LFU: a row that is less frequent than those that were moved down last would be the next to go: it is read below.
  // But every 64th hit claims a place all the same (reading counts no occurrences, so a load that only reads would
  // never move a row), and every 16th of equally frequent ones, which follows a change of load without moving rows all
  // the time.
  const auto claims = [&](int64_t turn) { return ++shard.clock % turn == 0; };
  const bool deserves =
      config_.lru || entry->frequency() > shard.cold_frequency ||
      claims(entry->frequency() == shard.cold_frequency ? 16 : 64) ||
      shard.FirstTierBytes() + shard.slabs[at.row_class].RowBytes() <= shard_limit_ - shard_limit_ / 8;
  if (deserves && Promote(shard, entry)) {
    const Row row = TopRow(shard, *entry);
    Touch(shard, row.meta);
    return {row.cell, row.meta};
  }
  return Peek(shard, *entry, scratch);  // reading needs no room
}

bool Table::OverHighWater(const Shard& shard) const {
  return shard.FirstTierBytes() > shard_limit_ - shard_limit_ / 16;
}

void Table::MakeRoom(Shard& shard, size_t row_class) {
  const RowSlabs& slabs = shard.slabs[row_class];
  const size_t bytes = slabs.RowBytes();
  const auto fits = [&] { return slabs.has_free() || shard.HeldBytes() + slabs.GrowthBytes() <= shard_limit_; };
  if (fits()) return;
  // Free cells belong to rows of other classes. Squeezing walks the index, so not for a few of them.
  if (shard.HeldBytes() - shard.FirstTierBytes() >= std::max(bytes, shard_limit_ / 32)) {
    Squeeze(shard, row_class);
    if (fits()) return;
  }
  if (shard.lower.empty()) {
    throw StorageFull(std::string("The ") + TierName(config_.tiers[0].kind) +
                      " tier is full and there is no tier below it: raise storage_size, evict, or add a tier. "
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

size_t Table::Demote(Shard& shard, uint32_t tier, size_t bytes) {
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
  size_t freed = 0;
  for (size_t i = 0; i < wanted && freed < bytes; ++i) {
    Entry* entry = victims[i].entry;
    const size_t row_class = Unpack(entry->state).row_class;
    uint32_t place;
    try {
      place = PutBelow(shard, tier, *entry);
    } catch (const StorageFull&) {
      if (freed > 0) break;  // some room was made; the caller sees whether it is enough
      throw;
    }
    FreeRow(shard, *entry);
    entry->state = Pack(tier + 1, row_class, place);
    freed += shard.slabs[row_class].RowBytes();
    ++shard.demoted;
    if (tier == 0) shard.cold_frequency = std::max(shard.cold_frequency, entry->frequency());
  }
  return freed;
}

// Copies a row to the tier below its own, which makes room for it as long as it can.
uint32_t Table::PutBelow(Shard& shard, uint32_t tier, const Entry& entry) {
  TierStore& target = *shard.lower[tier];
  std::vector<int64_t> scratch;
  Wrote(shard);
  for (;;) {
    const RowView view = Peek(shard, entry, &scratch);
    try {
      return target.Put(entry.hash, Unpack(entry.state).row_class, view.cell, view.meta);
    } catch (const StorageFull&) {
      if (target.Compact(Relocator(shard, tier + 1), /*force=*/true)) continue;
      if (tier + 1 == shard.lower.size() || target.rows() == 0) throw;
    }
    Demote(shard, tier + 1, 64 * 1024);
  }
}

TierStore::Moved Table::Relocator(Shard& shard, uint32_t tier) {
  return [&shard, tier](uint64_t hash, size_t row_class, uint32_t from, uint32_t to) {
    Entry* entry = shard.index.Find(hash);
    if (entry != nullptr && entry->state == Pack(tier, row_class, from)) entry->state = Pack(tier, row_class, to);
  };
}

void Table::RequestCompaction(const Shard& shard) {
  const bool wanted =
      std::any_of(shard.lower.begin(), shard.lower.end(), [](const auto& tier) { return tier->wants_compaction(); });
  if (wanted) RequestMaintenance(this);
}

bool Table::Maintain() {
  bool worked = false;
  std::exception_ptr error;
  for (auto& owned : shards_) {
    Shard& shard = *owned;
    std::unique_lock<std::shared_mutex> lock(shard.mutex);
    RequireOwner();
    Wrote(shard);
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

void Table::Note(const std::exception& error) {
  std::lock_guard<std::mutex> lock(error_mutex_);
  background_error_ = error.what();
}

bool Table::MaintainInBackground() {
  bool worked = false;
  std::string error;
  try {
    worked = Maintain();
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  std::lock_guard<std::mutex> lock(error_mutex_);
  background_error_ = error;
  return worked;
}

}  // namespace deeprec
