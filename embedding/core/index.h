// The index of one shard: open addressing over cache lines of four entries.
//
// Invariants:
//  * An entry holds the mixed key (Mix64 is a bijection, so equal hashes are equal keys) and a state. No key value
//    is reserved: emptiness is in the state, never in the key.
//  * A key lies in its home line or in a later one; every line between them was full when the key was inserted.
//    A freed entry becomes kEmpty only if its line has another empty entry (then nothing ever passed the line),
//    otherwise kDeleted. So a search ends at the first line with an empty entry.
//  * kEmpty is 0: fresh zero pages are a valid empty index.
//  * At most kMaxLoad of the entries are not empty, so every search ends.
#pragma once

#include <emmintrin.h>
#include <smmintrin.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "memory.h"

namespace deeprec {

// States of an entry; from kFirstRow on, the entry owns the row `state - kFirstRow` of its shard.
enum : uint32_t { kEmpty = 0, kDeleted = 1, kFiltered = 2, kFirstRow = 3 };

// The largest count of occurrences: the two bits above it are flags.
constexpr uint32_t kMaxFrequency = (1u << 30) - 1;
constexpr uint32_t kPending = 1u << 30;  // belongs to the running snapshot, which has not read it yet
constexpr uint32_t kChanged = 1u << 31;  // made or changed since the last snapshot

struct Entry {
  uint64_t hash;
  uint32_t state;
  uint32_t word;  // flags above the frequency

  bool has_row() const { return state >= kFirstRow; }
  bool live() const { return state >= kFiltered; }
  bool pending() const { return (word & kPending) != 0; }
  uint32_t frequency() const { return word & kMaxFrequency; }
  // Adds occurrences, up to the largest count; the flags stay.
  void Add(uint32_t count) {
    const uint32_t room = kMaxFrequency - frequency();
    word += count < room ? count : room;
  }
  void set_frequency(uint32_t frequency) {
    word = (word & ~kMaxFrequency) | (frequency < kMaxFrequency ? frequency : kMaxFrequency);
  }
};
static_assert(sizeof(Entry) == 16, "four entries fill a cache line");

class Index {
 public:
  Index() { Reset(kMinLines); }

  // Hints that `hash` is searched soon. Safe without the shard's lock.
  void Prefetch(uint64_t hash) const {
    const Line* lines = shared_lines_.load(std::memory_order_relaxed);
    __builtin_prefetch(lines + HomeLine(hash, shared_count_.load(std::memory_order_relaxed)));
  }

  Entry* Find(uint64_t hash) const {
    size_t at = HomeLine(hash, count_);
    const __m128i wanted = _mm_set1_epi64x(static_cast<int64_t>(hash));
    for (;;) {
      Line& line = lines_[at];
      const auto* raw = reinterpret_cast<const __m128i*>(line.entries);
      const __m128i low = _mm_unpacklo_epi64(_mm_load_si128(raw), _mm_load_si128(raw + 1));
      const __m128i high = _mm_unpacklo_epi64(_mm_load_si128(raw + 2), _mm_load_si128(raw + 3));
      int match = _mm_movemask_pd(_mm_castsi128_pd(_mm_cmpeq_epi64(low, wanted))) |
                  _mm_movemask_pd(_mm_castsi128_pd(_mm_cmpeq_epi64(high, wanted))) << 2;
      for (; match != 0; match &= match - 1) {
        Entry& entry = line.entries[__builtin_ctz(static_cast<unsigned>(match))];
        if (entry.live()) return &entry;
      }
      if (line.HasEmpty()) return nullptr;
      if (++at == count_) at = 0;
    }
  }

  // Adds a hash that is not there; the caller sets the state (a live one). It counts as changed. Invalidates entry
  // pointers.
  Entry* Insert(uint64_t hash) {
    if (used_ + 1 > limit_) Rehash(live_ + 1);
    Entry* entry = FindFree(hash);
    if (entry->state == kEmpty) ++used_;
    ++live_;
    entry->hash = hash;
    entry->word = kChanged;
    return entry;
  }

  void Erase(Entry* entry) {
    Line& line = lines_[(reinterpret_cast<char*>(entry) - reinterpret_cast<char*>(lines_)) / sizeof(Line)];
    if (line.HasEmpty()) {
      entry->state = kEmpty;
      --used_;
    } else {
      entry->state = kDeleted;
    }
    --live_;
  }

  void Clear() { Reset(kMinLines); }

  // Makes room for `entries` in all.
  void Reserve(size_t entries) {
    if (entries > limit_) Rehash(entries);
  }

  template <class Visitor>
  void ForEach(Visitor&& visit) {
    for (size_t at = 0; at < count_; ++at) {
      for (Entry& entry : lines_[at].entries) {
        if (entry.live()) visit(&entry);
      }
    }
  }

  // Visits what is live in some lines that follow each other.
  template <class Visitor>
  void VisitSome(uint64_t where, size_t lines, Visitor&& visit) {
    size_t at = HomeLine(where, count_);
    for (size_t i = 0; i < lines && i < count_; ++i) {
      for (Entry& entry : lines_[at].entries) {
        if (entry.live()) visit(&entry);
      }
      if (++at == count_) at = 0;
    }
  }

  size_t size() const { return live_; }
  size_t bytes() const { return block_.size(); }

 private:
  struct alignas(64) Line {
    Entry entries[4];
    bool HasEmpty() const {
      return entries[0].state == kEmpty || entries[1].state == kEmpty || entries[2].state == kEmpty ||
             entries[3].state == kEmpty;
    }
  };
  static constexpr size_t kMinLines = 4;

  // The low half of the hash, scaled: growing by a factor keeps the order of homes, so a rehash walks both arrays
  // from front to back.
  static size_t HomeLine(uint64_t hash, size_t count) {
    return static_cast<size_t>((static_cast<uint64_t>(static_cast<uint32_t>(hash)) * count) >> 32);
  }

  Entry* FindFree(uint64_t hash) const {
    size_t at = HomeLine(hash, count_);
    for (;;) {
      for (Entry& entry : lines_[at].entries) {
        if (!entry.live()) return &entry;
      }
      if (++at == count_) at = 0;
    }
  }

  void Reset(size_t lines) {
    block_ = ZeroedBlock(lines * sizeof(Line));
    Publish(lines);
    used_ = live_ = 0;
  }

  void Publish(size_t lines) {
    lines_ = reinterpret_cast<Line*>(block_.data());
    count_ = lines;
    limit_ = lines * 4 * 4 / 5;
    shared_lines_.store(lines_, std::memory_order_relaxed);
    shared_count_.store(count_, std::memory_order_relaxed);
  }

  // Grows to at least double unless deleted entries are what fills the index.
  void Rehash(size_t entries) {
    size_t lines = count_;
    while (lines * 4 * 4 / 5 < entries + entries / 4) lines *= 2;
    ZeroedBlock old(lines * sizeof(Line));
    const size_t old_count = count_;
    Line* old_lines = lines_;
    std::swap(old, block_);
    Publish(lines);
    used_ = live_;
    for (size_t at = 0; at < old_count; ++at) {
      for (const Entry& entry : old_lines[at].entries) {
        if (entry.live()) *FindFree(entry.hash) = entry;
      }
    }
  }

  ZeroedBlock block_;
  Line* lines_ = nullptr;
  size_t count_ = 0;
  size_t limit_ = 0;
  size_t used_ = 0;  // entries that are not empty
  size_t live_ = 0;
  // Copies for Prefetch, which runs without the lock; a stale one costs a useless prefetch, nothing else.
  std::atomic<Line*> shared_lines_{nullptr};
  std::atomic<size_t> shared_count_{0};
};

}  // namespace deeprec
