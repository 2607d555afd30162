// The library is looked for at run time, through its C interface: no build needs it, and a wheel runs without it.
#include "tier_leveldb.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "tier_mapped.h"

namespace deeprec {
namespace {

// The part of leveldb/c.h that is used; all handles are opaque.
struct Library {
  void* (*options_create)();
  void (*options_destroy)(void*);
  void (*options_set_create_if_missing)(void*, unsigned char);
  void (*options_set_compression)(void*, int);
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

// One database for all shards of a tier (they share its config); it goes with the last of them.
class Database {
 public:
  explicit Database(const std::string& directory) : library_(GetLibrary()), path_(directory + "/leveldb-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) {
      throw std::invalid_argument("Cannot make a directory in storage_path. Received: storage_path=" + directory);
    }
    void* options = library_.options_create();
    library_.options_set_create_if_missing(options, 1);
    library_.options_set_compression(options, 0);
    char* error = nullptr;
    db_ = library_.open(options, path_.c_str(), &error);
    library_.options_destroy(options);
    const std::string message = TakeError(error);
    if (!message.empty()) throw std::invalid_argument("LevelDB: " + message);
    read_ = library_.readoptions_create();
    write_ = library_.writeoptions_create();
  }
  ~Database() {
    library_.close(db_);
    library_.readoptions_destroy(read_);
    library_.writeoptions_destroy(write_);
    std::error_code harmless;  // a leftover directory is in nobody's way
    std::filesystem::remove_all(path_, harmless);
  }

  std::string Put(uint64_t hash, const std::string& record) {
    char* error = nullptr;
    library_.put(db_, write_, Key(hash), sizeof(hash), record.data(), record.size(), &error);
    return TakeError(error);
  }
  // Copies the record to `out` if it has exactly `bytes`.
  std::string Get(uint64_t hash, char* out, size_t bytes) const {
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
  std::string Erase(uint64_t hash) {
    char* error = nullptr;
    library_.erase(db_, write_, Key(hash), sizeof(hash), &error);
    return TakeError(error);
  }

 private:
  static const char* Key(const uint64_t& hash) { return reinterpret_cast<const char*>(&hash); }

  const Library& library_;
  std::string path_;
  void* db_ = nullptr;
  void* read_ = nullptr;
  void* write_ = nullptr;
};

std::shared_ptr<Database> Share(const TierConfig& config) {
  static std::mutex mutex;
  static std::map<const TierConfig*, std::weak_ptr<Database>> open;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Database> database = open[&config].lock();
  if (!database) {
    database = std::make_shared<Database>(config.path);
    open[&config] = database;
  }
  return database;
}

class LevelDbTier : public TierStore {
 public:
  LevelDbTier(const TierConfig& config, const std::vector<RowLayout>& classes)
      : config_(config), budget_(config), classes_(&classes), database_(Share(config)) {}

  uint32_t Put(uint64_t hash, size_t row_class, const char* cell, const int64_t* meta) override {
    const RowLayout& layout = (*classes_)[row_class];
    const size_t bytes = RecordBytes(layout);
    if (!budget_.Reserve(bytes)) ThrowFull(config_);
    std::string record(bytes, 0);
    WriteRecord(record.data(), layout, cell, meta);
    try {
      Store(hash, record);
    } catch (...) {
      budget_.Release(bytes);
      throw;
    }
    ++rows_;
    return 0;
  }

  RowView View(uint64_t hash, size_t row_class, uint32_t, std::vector<int64_t>* scratch) const override {
    const RowLayout& layout = (*classes_)[row_class];
    const size_t bytes = RecordBytes(layout);
    scratch->resize(bytes / sizeof(int64_t));
    auto* out = reinterpret_cast<char*>(scratch->data());
    const std::string error = database_->Get(hash, out, bytes);
    if (!error.empty()) throw std::runtime_error("LevelDB lost a row: " + error);
    return ViewRecord(out, layout);
  }

  void Prefetch(size_t, uint32_t, size_t) const override {}

  // A record that a failing disk keeps is unreachable, and overwritten when its key comes back.
  void Erase(uint64_t hash, size_t row_class, uint32_t) override {
    database_->Erase(hash);
    budget_.Release(RecordBytes((*classes_)[row_class]));
    --rows_;
  }

  void Change(uint64_t hash, size_t row_class, uint32_t handle, const Writer& change) override {
    const RowLayout& layout = (*classes_)[row_class];
    std::vector<int64_t> scratch;
    View(hash, row_class, handle, &scratch);
    change(reinterpret_cast<char*>(scratch.data() + layout.meta_words), scratch.data());
    Store(hash, std::string(reinterpret_cast<const char*>(scratch.data()), RecordBytes(layout)));
  }

  uint32_t Replace(uint64_t hash, size_t row_class, uint32_t, uint64_t other, const char* cell,
                   const int64_t* meta) override {
    const RowLayout& layout = (*classes_)[row_class];
    std::string record(RecordBytes(layout), 0);
    WriteRecord(record.data(), layout, cell, meta);
    Store(other, record);
    database_->Erase(hash);
    return 0;
  }

  // What is left in the database is unreachable, and overwritten when its keys come back.
  void Clear() override {
    budget_.Release(budget_.used());
    rows_ = 0;
  }

  bool Compact(const Moved&, bool) override { return false; }
  size_t rows() const override { return rows_; }
  size_t bytes() const override { return budget_.used(); }

 private:
  void Store(uint64_t hash, const std::string& record) {
    const std::string error = database_->Put(hash, record);
    if (!error.empty()) throw StorageFull("LevelDB: " + error);
  }

  const TierConfig& config_;
  Budget budget_;
  const std::vector<RowLayout>* classes_;
  const std::shared_ptr<Database> database_;
  size_t rows_ = 0;
};

}  // namespace

std::unique_ptr<TierStore> MakeLevelDbTier(const TierConfig& config, const std::vector<RowLayout>& classes) {
  return std::make_unique<LevelDbTier>(config, classes);
}

}  // namespace deeprec
