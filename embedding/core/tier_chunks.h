// A lower tier in memory that the CPU addresses: chunks of a mapped file, of persistent memory, of a NUMA node. Rows
// are read where they lie.
//
// A shard's chunks are of one size, and each has rows of one class; a chunk without rows goes back, so that the limit
// counts what is held, and what one class leaves serves another. Compaction empties sparse chunks into the places of
// others. Two ways to find a place for a row:
//  * in place: the place of a row that went is the next one's;
//  * as a log, for SSDs: rows are appended, so that writes are sequential, and places of rows that went are dead until
//    compaction. Rows that need no new place are changed where they are: only where there is no room elsewhere, and
//    when an eviction starts their age.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "tier.h"
#include "tier_common.h"

namespace deeprec {

class ChunkTier : public TierStore {
 public:
  ChunkTier(const TierConfig& config, const std::vector<RowLayout>& classes)
      : config_(config),
        log_(config.kind == TierKind::kSsd),
        budget_(config),
        chunk_bytes_(ChunkBytes(config, classes)) {
    for (const RowLayout& layout : classes) pools_.push_back(Pool(ChunkLayout(layout, chunk_bytes_)));
  }

  uint32_t Put(uint64_t hash, size_t row_class, const char* cell, const int64_t* meta) override {
    // Compaction of a log needs space before it gives any back.
    return Write(pools_[row_class], hash, cell, meta, log_ ? chunk_bytes_ : 0);
  }

  RowView View(uint64_t, size_t row_class, uint32_t handle, std::vector<int64_t>*) const override {
    const Pool& pool = pools_[row_class];
    char* data = pool.data[handle / pool.layout.rows];
    const uint32_t at = handle % pool.layout.rows;
    return {pool.layout.Cell(data, at), pool.layout.Meta(data, at)};
  }

  void Prefetch(size_t row_class, uint32_t handle, size_t bytes) const override {
    const Pool& pool = pools_[row_class];
    const char* cell = pool.layout.Cell(pool.data[handle / pool.layout.rows], handle % pool.layout.rows);
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(cell + at);
  }

  void Erase(uint64_t, size_t row_class, uint32_t handle) override {
    Pool& pool = pools_[row_class];
    const uint32_t index = handle / pool.layout.rows;
    Remove(pool, index, handle % pool.layout.rows);
    Chunk& chunk = pool.chunks[index];
    if (chunk.live != 0) return;
    if (index == pool.active) {
      chunk.used = 0;
      chunk.first_hole = 0;
    } else {
      Drop(pool, index);
    }
  }

  void Change(uint64_t hash, size_t row_class, uint32_t handle, const Writer& change) override {
    const RowView view = View(hash, row_class, handle, nullptr);
    change(const_cast<char*>(view.cell), const_cast<int64_t*>(view.meta));
  }

  uint32_t Replace(uint64_t, size_t row_class, uint32_t handle, uint64_t other, const char* cell,
                   const int64_t* meta) override {
    const Pool& pool = pools_[row_class];
    pool.layout.Write(pool.data[handle / pool.layout.rows], handle % pool.layout.rows, other, cell, meta);
    return handle;
  }

  void Clear() override {
    for (Pool& pool : pools_) pool = Pool(pool.layout);
    budget_.Release(budget_.used());
    rows_ = 0;
  }

  // One chunk for each call and class: a lookup waits for no more than that.
  bool Compact(const Moved& moved, bool force) override {
    bool worked = false;
    for (size_t row_class = 0; row_class < pools_.size(); ++row_class) {
      Pool& pool = pools_[row_class];
      if (IsIdle(pool)) {
        Drop(pool, pool.active);
        worked = true;
      }
      const uint32_t victim = log_ ? Deadest(pool, force) : Sparsest(pool, force);
      if (victim != kNone) worked = Relocate(pool, row_class, victim, moved) || worked;
    }
    return worked;
  }

  bool wants_compaction() const override {
    return std::any_of(pools_.begin(), pools_.end(), [](const Pool& pool) {
      return IsIdle(pool) || (pool.count > 1 && 2 * pool.rows <= (pool.count - 1) * size_t{pool.layout.rows});
    });
  }

  size_t rows() const override { return rows_; }
  size_t bytes() const override { return budget_.used(); }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  static constexpr size_t kMaxHandles = (size_t{1} << 26) - 8;

  struct Chunk {
    ZeroedBlock block;
    std::vector<uint64_t> taken;  // a bit for each place with a row
    uint32_t used = 0;            // places that were ever taken: the first ones
    uint32_t live = 0;
    uint32_t first_hole = 0;  // no word of `taken` before has one
    bool open = false;        // among the pool's open ones
    bool there() const { return block.data() != nullptr; }
  };

  // Chunks of one class; the places of some that went are null.
  struct Pool {
    explicit Pool(const ChunkLayout& of) : layout(of) {}
    ChunkLayout layout;
    std::vector<Chunk> chunks;
    std::vector<char*> data;       // of the chunks, close together: the way to every row
    std::vector<uint32_t> open;    // have places of rows that went, or had them
    std::vector<uint32_t> absent;  // indices of chunks that went
    uint32_t active = kNone;       // rows are appended to it
    uint32_t closed = kNone;       // takes no rows: it is being emptied
    size_t count = 0, rows = 0;
  };

  // It holds a chunk for the next row, and no row.
  static bool IsIdle(const Pool& pool) { return pool.active != kNone && pool.chunks[pool.active].live == 0; }

  uint32_t Write(Pool& pool, uint64_t hash, const char* cell, const int64_t* meta, size_t reserve) {
    const uint32_t handle = Take(pool, reserve);
    const uint32_t index = handle / pool.layout.rows, at = handle % pool.layout.rows;
    Chunk& chunk = pool.chunks[index];
    pool.layout.Write(pool.data[index], at, hash, cell, meta);
    chunk.taken[at / 64] |= uint64_t{1} << (at % 64);
    ++chunk.live;
    ++pool.rows;
    ++rows_;
    return handle;
  }

  // A place without a row.
  uint32_t Take(Pool& pool, size_t reserve) {
    while (!log_ && !pool.open.empty()) {
      const uint32_t index = pool.open.back();
      Chunk& chunk = pool.chunks[index];
      const uint32_t hole = chunk.there() && index != pool.closed ? Hole(chunk) : kNone;
      if (hole != kNone) return index * pool.layout.rows + hole;
      chunk.open = false;
      pool.open.pop_back();
    }
    if (pool.active == kNone || pool.chunks[pool.active].used == pool.layout.rows) AddChunk(pool, reserve);
    return pool.active * pool.layout.rows + pool.chunks[pool.active].used++;
  }

  static uint32_t Hole(Chunk& chunk) {
    for (; chunk.first_hole * 64 < chunk.used; ++chunk.first_hole) {
      const uint64_t holes = ~chunk.taken[chunk.first_hole];
      if (holes == 0) continue;
      const uint32_t at = chunk.first_hole * 64 + static_cast<uint32_t>(__builtin_ctzll(holes));
      if (at < chunk.used) return at;
      break;
    }
    return kNone;
  }

  // `reserve` bytes of the tier are left.
  void AddChunk(Pool& pool, size_t reserve) {
    const size_t index = pool.absent.empty() ? pool.chunks.size() : pool.absent.back();
    if ((index + 1) * pool.layout.rows > kMaxHandles || !budget_.Reserve(chunk_bytes_, reserve)) ThrowFull(config_);
    try {
      Chunk chunk;
      chunk.block = MakeTierBlock(config_, chunk_bytes_);
      chunk.block.Reserve(0, chunk_bytes_);
      chunk.taken.resize((pool.layout.rows + 63) / 64);
      if (index == pool.chunks.size()) {
        pool.data.resize(index + 1);
        pool.chunks.emplace_back();
      }
      chunk.open = pool.chunks[index].open;
      pool.chunks[index] = std::move(chunk);
      pool.data[index] = pool.chunks[index].block.data();
    } catch (...) {
      budget_.Release(chunk_bytes_);
      throw;
    }
    if (!pool.absent.empty()) pool.absent.pop_back();
    ++pool.count;
    pool.active = static_cast<uint32_t>(index);
  }

  void Drop(Pool& pool, uint32_t index) {
    const bool open = pool.chunks[index].open;
    pool.chunks[index] = Chunk{};
    pool.chunks[index].open = open;
    pool.absent.push_back(index);
    if (pool.active == index) pool.active = kNone;
    --pool.count;
    budget_.Release(chunk_bytes_);
  }

  void Remove(Pool& pool, uint32_t index, uint32_t at) {
    Chunk& chunk = pool.chunks[index];
    chunk.taken[at / 64] &= ~(uint64_t{1} << (at % 64));
    chunk.first_hole = std::min(chunk.first_hole, at / 64);
    --chunk.live;
    --pool.rows;
    --rows_;
    if (log_ || chunk.open) return;
    chunk.open = true;
    pool.open.push_back(index);
  }

  // Of a log: the chunk with the fewest rows among those with dead places; without `force`, one that is half dead.
  static uint32_t Deadest(const Pool& pool, bool force) {
    uint32_t worst = kNone;
    for (uint32_t i = 0; i < pool.chunks.size(); ++i) {
      const Chunk& chunk = pool.chunks[i];
      if (i == pool.active || !chunk.there() || chunk.live == chunk.used) continue;
      if (!force && chunk.live * 2 > chunk.used) continue;
      if (worst == kNone || chunk.live < pool.chunks[worst].live) worst = i;
    }
    if (worst == kNone && force && pool.active != kNone) {
      const Chunk& active = pool.chunks[pool.active];
      if (active.live < active.used) return pool.active;
    }
    return worst;
  }

  // The chunk with the fewest rows, if there are places for them in others; without `force`, if half of all are free.
  static uint32_t Sparsest(const Pool& pool, bool force) {
    const size_t free = pool.count * pool.layout.rows - pool.rows;
    if (pool.count < 2 || free < (force ? pool.layout.rows : std::max<size_t>(pool.rows, pool.layout.rows)))
      return kNone;
    uint32_t sparsest = kNone;
    for (uint32_t i = 0; i < pool.chunks.size(); ++i) {
      const Chunk& chunk = pool.chunks[i];
      if (!chunk.there() || i == pool.active) continue;
      if (sparsest == kNone || chunk.live < pool.chunks[sparsest].live) sparsest = i;
    }
    return sparsest;
  }

  bool Relocate(Pool& pool, size_t row_class, uint32_t index, const Moved& moved) {
    if (pool.active == index) pool.active = kNone;
    pool.closed = index;
    bool emptied = true;
    for (uint32_t at = 0; at < pool.chunks[index].used && emptied; ++at) {
      if ((pool.chunks[index].taken[at / 64] >> (at % 64) & 1) == 0) continue;
      char* data = pool.data[index];
      const uint64_t hash = pool.layout.Hash(data, at);
      const char* cell = pool.layout.Cell(data, at);
      const int64_t* meta = pool.layout.Meta(data, at);
      try {
        moved(hash, row_class, index * pool.layout.rows + at, Write(pool, hash, cell, meta, /*reserve=*/0));
        Remove(pool, index, at);
      } catch (const StorageFull&) {
        emptied = false;  // nothing is lost: the rest stays where it is
      }
    }
    pool.closed = kNone;
    if (emptied) Drop(pool, index);
    return emptied;
  }

  const TierConfig& config_;
  const bool log_;
  Budget budget_;
  const size_t chunk_bytes_;
  std::vector<Pool> pools_;
  size_t rows_ = 0;
};

}  // namespace deeprec
