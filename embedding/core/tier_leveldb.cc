#include "tier_leveldb.h"

#include <stdexcept>

#ifdef DEEPREC_LEVELDB
#include <leveldb/db.h>
#include <leveldb/write_batch.h>
#include <stdlib.h>

#include <filesystem>
#include <map>
#include <mutex>

#include "tier_mapped.h"
#endif

namespace deeprec {

#ifndef DEEPREC_LEVELDB

std::unique_ptr<TierStore> MakeLevelDbTier(const TierConfig&, const std::vector<RowLayout>&,
                                           const std::shared_ptr<Budget>&) {
  throw std::invalid_argument(
      "This build has no LevelDB: install libleveldb-dev and build again, or take another storage_type. "
      "Received: storage_type=LEVELDB");
}

#else

namespace {

// One database for all shards of a tier (they share the budget); it goes with the last of them.
class Database {
 public:
  explicit Database(const std::string& directory) : path_(directory + "/leveldb-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) {
      throw std::invalid_argument("Cannot make a directory in storage_path. Received: storage_path=" + directory);
    }
    leveldb::Options options;
    options.create_if_missing = true;
    options.compression = leveldb::kNoCompression;
    leveldb::DB* db = nullptr;
    const leveldb::Status status = leveldb::DB::Open(options, path_, &db);
    if (!status.ok()) throw std::invalid_argument("LevelDB: " + status.ToString());
    db_.reset(db);
  }
  ~Database() {
    db_.reset();
    std::error_code ignored;  // a leftover directory harms nobody
    std::filesystem::remove_all(path_, ignored);
  }
  leveldb::DB* get() const { return db_.get(); }

 private:
  std::string path_;
  std::unique_ptr<leveldb::DB> db_;
};

std::shared_ptr<Database> Share(const std::shared_ptr<Budget>& budget, const std::string& directory) {
  static std::mutex mutex;
  static std::map<Budget*, std::weak_ptr<Database> > open;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Database> database = open[budget.get()].lock();
  if (!database) {
    database = std::make_shared<Database>(directory);
    open[budget.get()] = database;
  }
  return database;
}

class LevelDbTier : public TierStore {
 public:
  LevelDbTier(const TierConfig& config, const std::vector<RowLayout>& classes, const std::shared_ptr<Budget>& budget)
      : budget_(budget), classes_(&classes), database_(Share(budget, config.path)) {}
  ~LevelDbTier() override { budget_->Release(bytes_); }

  uint32_t Put(uint64_t hash, size_t row_class, const char* cell, const int64_t* meta) override {
    const RowLayout& layout = (*classes_)[row_class];
    const size_t bytes = RecordBytes(layout);
    if (!budget_->Reserve(bytes)) {
      throw StorageFull("A tier is full: raise its storage_size, or evict. Received: storage_size=" +
                        std::to_string(budget_->limit()));
    }
    std::string record(bytes, 0);
    WriteRecord(record.data(), layout, cell, meta);
    const leveldb::Status status = database_->get()->Put({}, Key(hash), record);
    if (!status.ok()) {
      budget_->Release(bytes);
      throw StorageFull("LevelDB: " + status.ToString());
    }
    ++rows_;
    bytes_ += bytes;
    return 0;
  }

  RowView View(uint64_t hash, size_t row_class, uint32_t, std::vector<int64_t>* scratch) const override {
    std::string record;
    const leveldb::Status status = database_->get()->Get({}, Key(hash), &record);
    const RowLayout& layout = (*classes_)[row_class];
    if (!status.ok() || record.size() != RecordBytes(layout)) {
      throw std::runtime_error("LevelDB lost a row: " + status.ToString());
    }
    scratch->resize(record.size() / sizeof(int64_t));
    std::memcpy(scratch->data(), record.data(), record.size());
    return ViewRecord(reinterpret_cast<const char*>(scratch->data()), layout);
  }

  void Prefetch(size_t, uint32_t) const override {}

  void Erase(uint64_t hash, size_t row_class, uint32_t) override {
    const leveldb::Status status = database_->get()->Delete({}, Key(hash));
    if (!status.ok()) throw std::runtime_error("LevelDB: " + status.ToString());
    const size_t bytes = RecordBytes((*classes_)[row_class]);
    budget_->Release(bytes);
    bytes_ -= bytes;
    --rows_;
  }

  // The entries are gone with the index; what is left in the database is dead weight until its own compaction.
  void Clear() override {
    budget_->Release(bytes_);
    rows_ = bytes_ = 0;
  }

  bool Compact(const Moved&) override { return false; }
  size_t rows() const override { return rows_; }
  size_t bytes() const override { return bytes_; }

 private:
  static std::string Key(uint64_t hash) {
    std::string key(sizeof(hash), 0);
    std::memcpy(key.data(), &hash, sizeof(hash));
    return key;
  }

  const std::shared_ptr<Budget> budget_;
  const std::vector<RowLayout>* classes_;
  const std::shared_ptr<Database> database_;
  size_t rows_ = 0, bytes_ = 0;
};

}  // namespace

std::unique_ptr<TierStore> MakeLevelDbTier(const TierConfig& config, const std::vector<RowLayout>& classes,
                                           const std::shared_ptr<Budget>& budget) {
  return std::make_unique<LevelDbTier>(config, classes, budget);
}

#endif

}  // namespace deeprec
