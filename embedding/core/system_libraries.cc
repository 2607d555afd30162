#include "system_libraries.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

namespace deeprec {
namespace {

class Loader {
 public:
  explicit Loader(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (handle_ == nullptr) handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    complete_ = handle_ != nullptr;
  }
  template <class Symbol>
  void Load(Symbol& symbol, const char* name) {
    if (handle_ != nullptr) symbol = reinterpret_cast<Symbol>(dlsym(handle_, name));
    complete_ = complete_ && symbol != nullptr;
  }
  bool complete() const { return complete_; }

 private:
  void* handle_ = nullptr;
  bool complete_;
};

// The part of libpmem.h that is used.
struct Libpmem {
  void* (*map_file)(const char*, size_t, int, mode_t, size_t*, int*) = nullptr;
  int (*unmap)(void*, size_t) = nullptr;
};
constexpr int kPmemFileCreate = 1 << 0;
constexpr int kPmemFileSparse = 1 << 2;

const Libpmem* GetLibpmem() {
  static const Libpmem* const loaded = []() -> const Libpmem* {
    static Libpmem library;
    Loader loader({"libpmem.so.1", "libpmem.so"});
    loader.Load(library.map_file, "pmem_map_file");
    loader.Load(library.unmap, "pmem_unmap");
    return loader.complete() ? &library : nullptr;
  }();
  return loaded;
}

// The part of memkind.h that is used; kinds are opaque.
struct Memkind {
  void** dax_kmem_all = nullptr;
  int (*check_available)(void*) = nullptr;
  int (*create_fixed)(void*, size_t, void**) = nullptr;
  void* (*calloc)(void*, size_t, size_t) = nullptr;
  int (*posix_memalign)(void*, void**, size_t, size_t) = nullptr;
  void (*free)(void*, void*) = nullptr;
};

const Memkind* GetMemkind() {
  static const Memkind* const loaded = []() -> const Memkind* {
    static Memkind library;
    Loader loader({"libmemkind.so.0", "libmemkind.so"});
    loader.Load(library.dax_kmem_all, "MEMKIND_DAX_KMEM_ALL");
    loader.Load(library.check_available, "memkind_check_available");
    loader.Load(library.create_fixed, "memkind_create_fixed");
    loader.Load(library.calloc, "memkind_calloc");
    loader.Load(library.posix_memalign, "memkind_posix_memalign");
    loader.Load(library.free, "memkind_free");
    return loader.complete() ? &library : nullptr;
  }();
  return loaded;
}

const Memkind& NeedMemkind() {
  const Memkind* library = GetMemkind();
  if (library == nullptr) {
    throw std::invalid_argument(
        "memkind is not installed: install the package libmemkind0, or take another storage_type. "
        "Received: storage_type=PMEM_MEMKIND");
  }
  return *library;
}

// Zeroed, 64-byte aligned memory of a kind; null where it has none. calloc leaves fresh pages untouched, and aligns
// what is not small to cache lines; otherwise its result is exchanged for an aligned one.
char* Zeroed(const Memkind& library, void* kind, size_t bytes) {
  void* memory = library.calloc(kind, 1, bytes);
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % 64 == 0) return static_cast<char*>(memory);
  library.free(kind, memory);
  if (library.posix_memalign(kind, &memory, 64, bytes) != 0) return nullptr;
  std::memset(memory, 0, bytes);
  return static_cast<char*>(memory);
}

// Binds address space that memkind then hands out, so that a table can be on any node.
void* MakeKindOnNode(const Memkind& library, int node, size_t least) {
  size_t bytes = size_t{64} << 30;  // address space only: pages come when touched
  void* base = MAP_FAILED;
  while ((base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) ==
         MAP_FAILED) {
    bytes /= 2;
    if (bytes < 2 * least || bytes < size_t{64} << 20) throw std::bad_alloc();
  }
  constexpr int kBind = 2;  // MPOL_BIND
  unsigned long nodes[16] = {};
  constexpr int kBits = 8 * sizeof(nodes[0]);
  if (node < 16 * kBits) nodes[node / kBits] = 1UL << (node % kBits);
  if (syscall(SYS_mbind, base, bytes, kBind, nodes, 16UL * kBits + 1, 0U) != 0) {
    const std::string reason = std::strerror(errno);
    munmap(base, bytes);
    throw std::invalid_argument("The system gives no memory of this NUMA node: " + reason +
                                ". Received: numa_node=" + std::to_string(node));
  }
  void* kind = nullptr;
  if (library.create_fixed(base, bytes, &kind) != 0) {
    munmap(base, bytes);
    throw std::bad_alloc();
  }
  return kind;
}

}  // namespace

void RequireLibpmem() {
  if (GetLibpmem() == nullptr) {
    throw std::invalid_argument(
        "libpmem is not installed: install the package libpmem1, or take another storage_type (DRAM_PMEM does "
        "without). "
        "Received: storage_type=PMEM_LIBPMEM");
  }
}

void RequireMemkind(int node) { FreeOnNodes(AllocateOnNodes(node, 4096)); }

std::optional<PmemMapping> MapPmem(const std::string& path, size_t bytes) {
  const Libpmem* library = GetLibpmem();
  if (library == nullptr) return std::nullopt;
  size_t mapped = 0;
  int is_pmem = 0;
  void* data = library->map_file(path.c_str(), bytes, kPmemFileCreate | kPmemFileSparse, 0600, &mapped, &is_pmem);
  return PmemMapping{static_cast<char*>(data), mapped, is_pmem != 0};
}

void UnmapPmem(char* data, size_t bytes) { GetLibpmem()->unmap(data, bytes); }

char* AllocateOnNodes(int node, size_t bytes) {
  const Memkind& library = NeedMemkind();
  if (node < 0) {
    if (library.check_available(*library.dax_kmem_all) != 0) {
      const char* nodes = std::getenv("MEMKIND_DAX_KMEM_NODES");
      throw std::invalid_argument(
          "memkind finds no NUMA node of persistent memory: give numa_node, or set MEMKIND_DAX_KMEM_NODES before the "
          "process starts. Received: MEMKIND_DAX_KMEM_NODES=" +
          std::string(nodes == nullptr ? "" : nodes));
    }
    char* data = Zeroed(library, *library.dax_kmem_all, bytes);
    if (data == nullptr) throw std::bad_alloc();
    return data;
  }
  // One kind after the other for each node, for ever: what tables give back serves the next ones.
  static std::mutex mutex;
  static auto* kinds = new std::map<int, std::vector<void*>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<void*>& of_node = (*kinds)[node];
  if (!of_node.empty()) {
    if (char* data = Zeroed(library, of_node.back(), bytes)) return data;
  }
  of_node.push_back(MakeKindOnNode(library, node, bytes));
  char* data = Zeroed(library, of_node.back(), bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

// memkind knows the kind of its memory.
void FreeOnNodes(char* data) { NeedMemkind().free(nullptr, data); }

}  // namespace deeprec
