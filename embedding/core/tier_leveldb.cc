// The library is looked for at run time, through its C interface: no build needs it, and a wheel runs without it.
#include "tier_leveldb.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>

#include "tier_common.h"

namespace deeprec {
namespace {

// The part of leveldb/c.h that is used; all handles are opaque.
struct Library {
  void* (*options_create)();
  void (*options_destroy)(void*);
  void (*options_set_create_if_missing)(void*, unsigned char);
  void (*options_set_compression)(void*, int);
  void (*options_set_write_buffer_size)(void*, size_t);
  void (*compact_range)(void*, const char*, size_t, const char*, size_t);
  void* (*readoptions_create)();
  void (*readoptions_destroy)(void*);
  void* (*writeoptions_create)();
  void (*writeoptions_destroy)(void*);
  void* (*open)(const void*, const char*, char**);
  void (*close)(void*);
  void (*put)(void*, const void*, const char*, size_t, const char*, size_t, char**);
  char* (*get)(void*, const void*, const char*, size_t, size_t*, char**);
  void (*erase)(void*, const void*, const char*, size_t, char**);
  void (*release)(void*);
};

const Library& GetLibrary() {
  static const Library* const loaded = [] {
    void* handle = nullptr;
    for (const char* name : {"libleveldb.so.1d", "libleveldb.so.1", "libleveldb.so"}) {
      if (handle == nullptr) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    static Library library;
    bool complete = handle != nullptr;
    const auto load = [&](auto& function, const char* name) {
      if (handle != nullptr) function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
      complete = complete && function != nullptr;
    };
    load(library.options_create, "leveldb_options_create");
    load(library.options_destroy, "leveldb_options_destroy");
    load(library.options_set_create_if_missing, "leveldb_options_set_create_if_missing");
    load(library.options_set_compression, "leveldb_options_set_compression");
    load(library.options_set_write_buffer_size, "leveldb_options_set_write_buffer_size");
    load(library.compact_range, "leveldb_compact_range");
    load(library.readoptions_create, "leveldb_readoptions_create");
    load(library.readoptions_destroy, "leveldb_readoptions_destroy");
    load(library.writeoptions_create, "leveldb_writeoptions_create");
    load(library.writeoptions_destroy, "leveldb_writeoptions_destroy");
    load(library.open, "leveldb_open");
    load(library.close, "leveldb_close");
    load(library.put, "leveldb_put");
    load(library.get, "leveldb_get");
    load(library.erase, "leveldb_delete");
    load(library.release, "leveldb_free");
    return complete ? &library : nullptr;
  }();
  if (loaded == nullptr) {
    throw std::invalid_argument(
        "LevelDB is not installed: install the package libleveldb1d (or libleveldb-dev), or take another storage_type. "
        "Received: storage_type=LEVELDB");
  }
  return *loaded;
}

// Takes an error message of the library; empty where there is none.
std::string TakeError(char* error) {
  if (error == nullptr) return {};
  std::string text(error);
  GetLibrary().release(error);
  return text;
}

std::string LevelDbError(const std::string& message) { return "LevelDB: " + message; }

// One database for all shards of a tier (they share its config); it goes with the last of them. Its directory is locked
// by the process that lives on it, so that the next process finds those that killed ones left, and removes them.
//
// The limit is of all its files: a compaction writes as much as it reads before it gives anything back, so live records
// fill at most half of it.
class Database {
 public:
  explicit Database(const TierConfig& config) : library_(GetLibrary()), config_(config) {
    if (config.bytes != 0 && config.bytes < kLeastLimit) {
      throw std::invalid_argument("A LevelDB tier must have room for " + std::to_string(kLeastLimit) +
                                  " bytes. Received: storage_size=" + std::to_string(config.bytes));
    }
    RemoveLeftBehind(config.path);
    path_ = config.path + "/leveldb-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) {
      throw std::invalid_argument("Cannot make a directory in storage_path. Received: storage_path=" + config.path);
    }
    try {
      // Locked before it has its name: whoever finds it finds it locked.
      const std::string unnamed = path_ + "/new", owner = path_ + kOwner;
      owner_ = open(unnamed.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
      if (owner_ < 0 || flock(owner_, LOCK_EX | LOCK_NB) != 0 || rename(unnamed.c_str(), owner.c_str()) != 0) {
        throw std::invalid_argument("Cannot lock a file in storage_path. Received: storage_path=" + config.path);
      }
      options_ = library_.options_create();
      library_.options_set_create_if_missing(options_, 1);
      library_.options_set_compression(options_, 0);
      library_.options_set_write_buffer_size(options_, buffer_bytes());
      read_ = library_.readoptions_create();
      write_ = library_.writeoptions_create();
      const std::string error = Open();
      if (!error.empty()) throw std::invalid_argument(LevelDbError(error));
    } catch (...) {
      Release();
      throw;
    }
  }
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;
  // A forked child leaves all to its parent.
  ~Database() {
    if (generation_ == ForkGeneration()) Release();
  }

  // `grows`: the key is new. Throws StorageFull, and nothing is changed.
  void Put(uint64_t hash, const std::string& record, bool grows) {
    std::lock_guard<std::mutex> writing(writing_);
    RequireWritable();
    RequireRoom(record.size(), grows);
    char* error = nullptr;
    library_.put(db_, write_, Key(hash), sizeof(hash), record.data(), record.size(), &error);
    NoteWrite(TakeError(error), record.size());
    live_ += grows;
  }

  // Copies the record to `out` if it has exactly `bytes`; returns an error otherwise.
  std::string Get(uint64_t hash, char* out, size_t bytes) {
    RequireParent();
    std::shared_lock<std::shared_mutex> open(mutex_);
    if (db_ == nullptr) {
      open.unlock();
      std::lock_guard<std::mutex> writing(writing_);
      if (!Recover()) return error_;
      open.lock();
      if (db_ == nullptr) return error_;
    }
    char* error = nullptr;
    size_t length = 0;
    char* value = library_.get(db_, read_, Key(hash), sizeof(hash), &length, &error);
    std::string message = TakeError(error);
    if (value == nullptr || length != bytes) {
      if (message.empty()) message = "no such record";
    } else {
      std::memcpy(out, value, bytes);
    }
    if (value != nullptr) library_.release(value);
    return message;
  }

  // Never throws: a record that a failing disk keeps is unreachable, and overwritten when its key comes back.
  void Erase(uint64_t hash, size_t bytes, bool shrinks = true) {
    std::lock_guard<std::mutex> writing(writing_);
    live_ -= shrinks;
    erased_ += bytes;
    if (broken_ || generation_ != ForkGeneration()) return;
    char* error = nullptr;
    library_.erase(db_, write_, Key(hash), sizeof(hash), &error);
    const std::string message = TakeError(error);
    broken_ = !message.empty();
    if (broken_) error_ = message;
    written_ += sizeof(hash);
  }

  // Rows that nobody reads again; with the last one, all files go.
  void Forget(size_t rows) {
    std::lock_guard<std::mutex> writing(writing_);
    live_ -= rows;
    if (live_ != 0 || rows == 0) return;
    std::unique_lock<std::shared_mutex> closed(mutex_);
    if (db_ != nullptr) library_.close(db_);
    db_ = nullptr;
    for (const auto& file : Files()) {
      std::error_code harmless;
      if (file.path() != path_ + kOwner) std::filesystem::remove(file.path(), harmless);
    }
    error_ = Open();
    broken_ = !error_.empty();
    full_ = false;
    Measure();
  }

  // Of all files.
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const auto& file : Files()) {
      std::error_code gone;
      const uint64_t size = file.file_size(gone);
      if (!gone) sum += size;
    }
    return sum;
  }

 private:
  static constexpr uint64_t kLeastLimit = uint64_t{1} << 20;
  static constexpr const char* kOwner = "/owner";

  static const char* Key(const uint64_t& hash) { return reinterpret_cast<const char*>(&hash); }

  size_t buffer_bytes() const {
    constexpr uint64_t kLeast = uint64_t{64} << 10, kMost = uint64_t{4} << 20;
    return config_.bytes == 0 ? kMost : std::clamp<uint64_t>(config_.bytes / 32, kLeast, kMost);
  }

  static void RemoveLeftBehind(const std::string& directory) {
    std::error_code harmless;
    for (const auto& one : std::filesystem::directory_iterator(directory, harmless)) {
      if (one.path().filename().string().rfind("leveldb-", 0) != 0) continue;
      const int owner = open((one.path().string() + kOwner).c_str(), O_RDWR | O_CLOEXEC);
      if (owner < 0) continue;
      if (flock(owner, LOCK_EX | LOCK_NB) == 0) std::filesystem::remove_all(one.path(), harmless);
      close(owner);
    }
  }

  std::vector<std::filesystem::directory_entry> Files() const {
    std::vector<std::filesystem::directory_entry> files;
    std::error_code gone;
    for (std::filesystem::directory_iterator at(path_, gone), end; !gone && at != end; at.increment(gone)) {
      files.push_back(*at);
    }
    return files;
  }

  std::string Open() {
    char* error = nullptr;
    void* db = library_.open(options_, path_.c_str(), &error);
    const std::string message = TakeError(error);
    if (message.empty()) db_ = db;
    return message;
  }

  void Release() {
    if (db_ != nullptr) library_.close(db_);
    if (options_ != nullptr) library_.options_destroy(options_);
    if (read_ != nullptr) library_.readoptions_destroy(read_);
    if (write_ != nullptr) library_.writeoptions_destroy(write_);
    std::error_code harmless;
    std::filesystem::remove_all(path_, harmless);
    if (owner_ >= 0) close(owner_);
  }

  void RequireParent() const {
    if (generation_ == ForkGeneration()) return;
    throw std::runtime_error("LevelDB cannot be read by a process that was forked off. Make or restore a table here.");
  }

  void RequireWritable() {
    RequireParent();
    if (broken_ && !Recover()) throw StorageFull(LevelDbError(error_));
  }

  // After an error, LevelDB takes no write for ever, or its journal has a torn end that must have nothing behind it:
  // from the first error on nothing is written, until there is space to open it anew. Reading goes on meanwhile.
  bool Recover() {
    const std::string probe = path_ + "/probe";
    const int file = open(probe.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) return false;
    const int failure = posix_fallocate(file, 0, static_cast<off_t>(4 * buffer_bytes() + (size_t{1} << 20)));
    close(file);
    unlink(probe.c_str());
    if (failure != 0) return false;
    std::unique_lock<std::shared_mutex> closed(mutex_);
    if (db_ != nullptr) library_.close(db_);
    db_ = nullptr;
    const std::string error = Open();
    broken_ = !error.empty();
    if (broken_) error_ = error;
    return !broken_;
  }

  void NoteWrite(const std::string& error, size_t bytes) {
    written_ += bytes + 32;
    if (error.empty()) return;
    broken_ = true;
    error_ = error;
    throw StorageFull(LevelDbError(error));
  }

  void Measure() {
    measured_ = bytes();
    written_ = 0;
  }

  void RequireRoom(size_t bytes, bool grows) {
    if (config_.bytes == 0) return;
    if (full_ && grows && erased_ < config_.bytes / 64) ThrowFull(config_);
    const uint64_t most = grows ? config_.bytes / 16 * 7 : config_.bytes / 2;
    const auto fits = [&] { return measured_ + written_ + bytes <= most; };
    if (written_ > config_.bytes / 64 || !fits()) Measure();
    if (fits()) return;
    library_.compact_range(db_, nullptr, 0, nullptr, 0);
    Measure();
    erased_ = 0;
    full_ = !fits();
    if (full_ && grows) ThrowFull(config_);
  }

  const Library& library_;
  const TierConfig& config_;
  const unsigned generation_ = ForkGeneration();
  std::string path_;
  int owner_ = -1;
  void* options_ = nullptr;
  void* read_ = nullptr;
  void* write_ = nullptr;
  std::shared_mutex mutex_;  // the database is opened and closed, against its use
  void* db_ = nullptr;
  std::mutex writing_;  // all below, and one write at a time
  bool broken_ = false, full_ = false;
  std::string error_;
  uint64_t measured_ = 0, written_ = 0, erased_ = 0;
  size_t live_ = 0;
};

// Sets whether it was made just now.
std::shared_ptr<Database> Share(const TierConfig& config, bool* made) {
  static std::mutex mutex;
  static std::map<const TierConfig*, std::weak_ptr<Database>> open;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Database> database = open[&config].lock();
  *made = !database;
  if (*made) {
    database = std::make_shared<Database>(config);
    open[&config] = database;
  }
  return database;
}

class LevelDbTier : public TierStore {
 public:
  LevelDbTier(const TierConfig& config, const std::vector<RowLayout>& classes)
      : classes_(&classes), database_(Share(config, &counts_)) {}

  uint32_t Put(uint64_t hash, size_t row_class, const char* cell, const int64_t* meta) override {
    database_->Put(hash, Record(row_class, cell, meta), /*grows=*/true);
    ++rows_;
    return 0;
  }

  RowView View(uint64_t hash, size_t row_class, uint32_t, std::vector<int64_t>* scratch) const override {
    const RowLayout& layout = (*classes_)[row_class];
    const size_t bytes = RecordBytes(layout);
    scratch->resize(bytes / sizeof(int64_t));
    auto* out = reinterpret_cast<char*>(scratch->data());
    const std::string error = database_->Get(hash, out, bytes);
    if (!error.empty()) throw std::runtime_error("LevelDB does not give a row: " + error);
    return ViewRecord(out, layout);
  }

  void Prefetch(size_t, uint32_t, size_t) const override {}

  void Erase(uint64_t hash, size_t row_class, uint32_t) override {
    database_->Erase(hash, RecordBytes((*classes_)[row_class]));
    --rows_;
  }

  void Change(uint64_t hash, size_t row_class, uint32_t handle, const Writer& change) override {
    const RowLayout& layout = (*classes_)[row_class];
    std::vector<int64_t> scratch;
    View(hash, row_class, handle, &scratch);
    change(reinterpret_cast<char*>(scratch.data() + layout.meta_words), scratch.data());
    const std::string record(reinterpret_cast<const char*>(scratch.data()), RecordBytes(layout));
    database_->Put(hash, record, /*grows=*/false);
  }

  uint32_t Replace(uint64_t hash, size_t row_class, uint32_t, uint64_t other, const char* cell,
                   const int64_t* meta) override {
    database_->Put(other, Record(row_class, cell, meta), /*grows=*/false);
    database_->Erase(hash, 0, /*shrinks=*/false);  // as many rows as before
    return 0;
  }

  // What is left in the database is unreachable, and overwritten when its keys come back.
  void Clear() override {
    database_->Forget(rows_);
    rows_ = 0;
  }

  bool Compact(const Moved&, bool) override { return false; }
  size_t rows() const override { return rows_; }
  // Of all shards, told by one of them.
  size_t bytes() const override { return counts_ ? database_->bytes() : 0; }

 private:
  std::string Record(size_t row_class, const char* cell, const int64_t* meta) const {
    const RowLayout& layout = (*classes_)[row_class];
    std::string record(RecordBytes(layout), 0);
    WriteRecord(record.data(), layout, cell, meta);
    return record;
  }

  bool counts_ = false;
  const std::vector<RowLayout>* classes_;
  const std::shared_ptr<Database> database_;
  size_t rows_ = 0;
};

}  // namespace

std::unique_ptr<TierStore> MakeLevelDbTier(const TierConfig& config, const std::vector<RowLayout>& classes) {
  return std::make_unique<LevelDbTier>(config, classes);
}

}  // namespace deeprec
