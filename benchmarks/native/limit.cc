// The physical limit that the engine is measured against: a bare loop that probes an open-addressing array of
// (key, row) and copies the row, split over threads. No locks, no counts, no admission, no growth.
// usage: limit KEYS DIM THREADS BATCH SECONDS IDS_FILE PREFETCH
// IDS_FILE holds int64 ids in [0, KEYS); batches are taken from it in turn. Prints lookups and Adagrad updates per
// second.
#include <sys/mman.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Slot {
  int64_t key;
  int64_t row;
};

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

void* Pages(size_t bytes) {
  const size_t huge = size_t{2} << 20;
  void* memory = std::aligned_alloc(huge, (bytes + huge - 1) / huge * huge);
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 0, bytes);
  return memory;
}

double Rate(double seconds, size_t threads, size_t batch, size_t batches,
            const std::function<void(size_t, size_t, size_t)>& work) {
  size_t rounds = 0;
  const auto start = std::chrono::steady_clock::now();
  double elapsed = 0;
  while (elapsed < seconds) {
    const size_t first = (rounds % batches) * batch;
    std::vector<std::thread> pool;
    for (size_t t = 1; t < threads; ++t) pool.emplace_back(work, first, batch * t / threads, batch * (t + 1) / threads);
    work(first, 0, batch / threads);
    for (auto& thread : pool) thread.join();
    ++rounds;
    elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return static_cast<double>(rounds * batch) / elapsed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  const size_t keys = std::strtoull(argv[1], nullptr, 10), dim = std::strtoull(argv[2], nullptr, 10);
  const size_t threads = std::strtoull(argv[3], nullptr, 10), batch = std::strtoull(argv[4], nullptr, 10);
  const double seconds = std::strtod(argv[5], nullptr);
  const bool prefetch = std::atoi(argv[7]) != 0;
  std::vector<int64_t> ids;
  FILE* file = std::fopen(argv[6], "rb");
  if (file == nullptr) return 3;
  int64_t id;
  while (std::fread(&id, sizeof(id), 1, file) == 1) ids.push_back(id);
  std::fclose(file);

  size_t capacity = 1;
  while (capacity < keys * 2) capacity *= 2;
  Slot* slots = static_cast<Slot*>(Pages(capacity * sizeof(Slot)));
  float* rows = static_cast<float*>(Pages(keys * dim * sizeof(float)));
  float* accumulators = static_cast<float*>(Pages(keys * dim * sizeof(float)));
  for (size_t i = 0; i < keys; ++i) {
    size_t at = Mix(i) & (capacity - 1);
    while (slots[at].row != 0) at = (at + 1) & (capacity - 1);
    slots[at] = {static_cast<int64_t>(i), static_cast<int64_t>(i) + 1};
  }
  for (size_t i = 0; i < keys * dim; ++i) accumulators[i] = 0.1f;
  float* out = static_cast<float*>(Pages(batch * dim * sizeof(float)));
  float* gradients = static_cast<float*>(Pages(batch * dim * sizeof(float)));
  for (size_t i = 0; i < batch * dim; ++i) gradients[i] = 0.01f;

  const auto find = [&](int64_t key) {
    size_t at = Mix(static_cast<uint64_t>(key)) & (capacity - 1);
    while (slots[at].key != key || slots[at].row == 0) at = (at + 1) & (capacity - 1);
    return static_cast<size_t>(slots[at].row - 1);
  };
  constexpr size_t kAhead = 16;
  const auto each = [&](size_t first, size_t begin, size_t end, auto&& use) {
    const int64_t* batch_ids = ids.data() + first;
    if (!prefetch) {
      for (size_t i = begin; i < end; ++i) use(i, find(batch_ids[i]));
      return;
    }
    size_t found[kAhead];
    for (size_t i = begin; i < end + 2 * kAhead; ++i) {
      if (i >= begin + 2 * kAhead) use(i - 2 * kAhead, found[(i - 2 * kAhead) % kAhead]);
      if (i >= begin + kAhead && i - kAhead < end) {
        const size_t row = find(batch_ids[i - kAhead]);
        found[(i - kAhead) % kAhead] = row;
        for (size_t k = 0; k < dim; k += 16) __builtin_prefetch(rows + row * dim + k);
      }
      if (i < end) __builtin_prefetch(slots + (Mix(static_cast<uint64_t>(batch_ids[i])) & (capacity - 1)));
    }
  };
  const size_t batches = ids.size() / batch;
  const double lookups = Rate(seconds, threads, batch, batches, [&](size_t first, size_t begin, size_t end) {
    each(first, begin, end,
         [&](size_t i, size_t row) { std::memcpy(out + i * dim, rows + row * dim, dim * sizeof(float)); });
  });
  const double updates = Rate(seconds, threads, batch, batches, [&](size_t first, size_t begin, size_t end) {
    each(first, begin, end, [&](size_t i, size_t row) {
      float* w = rows + row * dim;
      float* a = accumulators + row * dim;
      const float* g = gradients + i * dim;
      for (size_t k = 0; k < dim; ++k) {
        a[k] += g[k] * g[k];
        w[k] -= 0.01f * g[k] / std::sqrt(a[k] + 1e-7f);
      }
    });
  });
  std::printf("%.0f %.0f\n", lookups, updates);
  return 0;
}
