// Concurrent lookups, updates, evictions, snapshots, erasures and growth on one table, for the sanitizers; also a
// test in itself: integer-valued gradients make sums exact, so a lost or doubled update shows.
//
// Hot keys are updated all the time and must end at minus the sum of their gradients. Cold keys come and go. A third
// range is erased while it is read. Every element of a row always has the same value: a torn read shows.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "hashing.h"
#include "ledger.h"
#include "lookup.h"
#include "snapshot.h"
#include "table.h"
#include "thread_pool.h"

namespace {

using deeprec::Initializer;
using deeprec::KeySpan;
using deeprec::Optimizer;
using deeprec::Table;
using deeprec::TableConfig;

constexpr size_t kDim = 8;
constexpr int64_t kHot = 2000;
constexpr int64_t kCold = 1 << 20;
constexpr int64_t kErased = -4000;
constexpr double kOwnRate = std::numeric_limits<double>::quiet_NaN();

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

void Check(bool condition, const char* what) {
  if (!condition) Fail(what);
}

KeySpan Span(const std::vector<int64_t>& keys) { return {keys.data(), nullptr, keys.size()}; }

void CheckRows(const std::vector<float>& rows) {
  for (size_t i = 0; i < rows.size(); i += kDim) {
    for (size_t k = 1; k < kDim; ++k) Check(rows[i + k] == rows[i], "a row was torn");
    Check(rows[i] == std::floor(rows[i]), "a value is not a whole number");
  }
}

// By way of a snapshot, or of the keys of now.
void Export(Table& table, bool as_snapshot) {
  std::unique_ptr<deeprec::Snapshot> snapshot;
  std::vector<int64_t> keys, filtered, counts;
  if (as_snapshot) {
    snapshot = std::make_unique<deeprec::Snapshot>(&table, false);
    keys.resize(snapshot->num_rows());
  } else {
    table.Keys(&keys, &filtered, &counts);
  }
  std::vector<uint8_t> present(keys.size(), 1);
  std::vector<int64_t> frequency(keys.size()), version(keys.size());
  std::vector<float> value(keys.size() * kDim), slot(keys.size() * kDim);
  deeprec::RowColumns columns;
  columns.frequency = frequency.data();
  columns.version = version.data();
  columns.value = value.data();
  columns.slots = {slot.data()};
  if (as_snapshot) {
    snapshot->Read(0, keys.size(), keys.data(), columns);
  } else {
    table.Export(Span(keys), present.data(), columns);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!present[i]) continue;
    Check(version[i] >= -1, "a version is garbage");
    for (size_t k = 1; k < kDim; ++k) {
      Check(value[i * kDim + k] == value[i * kDim], "an export tore a value");
      Check(slot[i * kDim + k] == slot[i * kDim], "an export tore a slot");
    }
  }
  const deeprec::TableStats stats = table.Stats();
  Check(stats.rows >= 0 && stats.filtered >= 0 && stats.bytes > 0, "statistics are garbage");
}

// Whether there was room for the work. What has a row needs none.
template <class Work>
bool Try(Work&& work) {
  try {
    work();
  } catch (const deeprec::StorageFull&) {
    return false;
  }
  return true;
}

// `fills`: the last tier has not room for all cold keys.
void Run(double seconds, const std::vector<deeprec::TierConfig>& tiers, bool fills = false) {
  // A momentum that rounds to zero as a float: every update writes a slot, and sums stay exact.
  const Optimizer optimizer("SGD", {{"learning_rate", 1}, {"momentum", 1e-300}, {"nesterov", 0}});
  TableConfig config{kDim, {}, optimizer, Initializer("Constant", 0, 0, 1)};
  config.eviction.steps_to_live = 100;
  config.tiers = tiers;
  Table table(config);
  std::vector<std::atomic<int64_t>> sums(kHot);
  std::atomic<int64_t> step{0};
  std::atomic<bool> stop{false};
  std::atomic<int64_t> refused{0};
  std::vector<std::thread> threads;
  if (fills) {
    std::vector<int64_t> keys;
    for (int64_t key = 0; key < kHot; ++key) keys.push_back(key);
    std::vector<float> rows(keys.size() * kDim);
    deeprec::Pull({{&table, Span(keys), rows.data()}}, true);
    step.store(1);
    deeprec::Push({{&table, Span(keys), rows.data()}}, 1, kOwnRate);  // zeros
  }

  for (int worker = 0; worker < 3; ++worker) {
    threads.emplace_back([&, worker] {
      std::mt19937_64 random(worker);
      while (!stop.load()) {
        std::vector<int64_t> keys[2];  // cold ones, and hot ones
        std::vector<float> gradients[2];
        for (int i = 0; i < 3000; ++i) {
          const bool hot = i % 3 != 0;
          const int64_t key =
              hot ? static_cast<int64_t>(random() % kHot) : kCold + static_cast<int64_t>(random() % 60000);
          const int64_t gradient = static_cast<int64_t>(random() % 7) - 3;
          keys[hot].push_back(key);
          gradients[hot].insert(gradients[hot].end(), kDim, static_cast<float>(gradient));
          if (hot) sums[key].fetch_add(gradient);
        }
        const int64_t now = step.fetch_add(1) + 1;
        for (const bool hot : {false, true}) {
          std::vector<float> rows(keys[hot].size() * kDim);
          const bool done = Try([&] {
            deeprec::Pull({{&table, Span(keys[hot]), rows.data()}}, true);
            CheckRows(rows);
            deeprec::Push({{&table, Span(keys[hot]), gradients[hot].data()}}, now, kOwnRate);
          });
          Check(done || (fills && !hot), "there was no room");
          refused.fetch_add(!done);
        }
      }
    });
  }
  threads.emplace_back([&] {
    std::mt19937_64 random(99);
    while (!stop.load()) {
      std::vector<int64_t> keys;
      for (int i = 0; i < 500; ++i) keys.push_back(kErased + static_cast<int64_t>(random() % 800));
      const std::vector<float> values(keys.size() * kDim, 3);
      Check(Try([&] { table.Upsert(Span(keys), values.data()); }) || fills, "there was no room");
      std::vector<float> rows(keys.size() * kDim);
      deeprec::Pull({{&table, Span(keys), rows.data()}}, false);
      CheckRows(rows);
      table.Erase(Span(keys));
    }
  });
  threads.emplace_back([&] {
    for (bool as_snapshot = false; !stop.load(); as_snapshot = !as_snapshot) {
      for (int64_t key : table.Evict(step.load(), 0)) Check(key >= kCold || key < 0, "a hot row was evicted");
      Export(table, as_snapshot);
    }
  });

  // The threads work for a while, on a slow machine until something was evicted and moved. Each step touches about half
  // of the hot keys, so none gets 100 steps old, even if a late worker sets back its version.
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  for (bool enough = false; elapsed() < seconds || (!enough && elapsed() < 100);) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const deeprec::TableStats now = table.Stats();
    enough = now.evicted > 0 && (tiers.empty() || (now.demoted > 0 && now.promoted > 0)) && (!fills || refused > 0);
  }
  stop.store(true);
  for (auto& thread : threads) thread.join();

  std::vector<int64_t> keys;
  for (int64_t key = 0; key < kHot; ++key) keys.push_back(key);
  std::vector<float> rows(keys.size() * kDim);
  deeprec::Pull({{&table, Span(keys), rows.data()}}, false);
  for (int64_t key = 0; key < kHot; ++key) {
    Check(rows[key * kDim] == static_cast<float>(-sums[key].load()), "an update was lost or done twice");
  }
  const deeprec::TableStats stats = table.Stats();
  Check(tiers.empty() || (stats.demoted > 0 && stats.promoted > 0), "no row moved: the test is too short");
  Check(stats.evicted > 0, "nothing was evicted: the test is too short");
  std::printf("steps %lld rows %lld evicted %lld\n", static_cast<long long>(step.load()),
              static_cast<long long>(stats.rows), static_cast<long long>(stats.evicted));
}

// Edges that only a memory checker judges: strings of every length, growth, unusual widths.
void Edges() {
  std::vector<char> text(300, 'x');
  for (size_t n = 0; n <= text.size(); ++n) deeprec::Fingerprint64(text.data() + (text.size() - n), n);
  for (const size_t dim : {1u, 3u, 17u, 300u}) {
    const Optimizer optimizer("Adam", {{"learning_rate", 0.1}, {"beta_1", 0.9}, {"beta_2", 0.99}, {"epsilon", 1e-7}});
    TableConfig config{dim, {}, optimizer, Initializer("TruncatedNormal", 0, 1, 1)};
    config.admission.kind = deeprec::AdmissionConfig::Kind::kCounter;
    config.admission.threshold = 2;
    config.eviction.steps_to_live = 1;
    Table table(config);
    std::vector<int64_t> keys;
    for (int64_t key = -3000; key < 3000; ++key) keys.push_back(key * 977 % 3500);
    std::vector<float> rows(keys.size() * dim);
    for (int64_t step = 1; step < 6; ++step) {
      deeprec::Pull({{&table, Span(keys), rows.data()}}, true);
      deeprec::Push({{&table, Span(keys), rows.data()}}, step, kOwnRate);
      if (step == 3) table.Clear();
    }
    table.Evict(100, 0);
  }
  std::vector<int64_t> keys{1, 2, 1, -1, std::numeric_limits<int64_t>::min()};
  std::vector<int64_t> unique(keys.size()), counts(keys.size());
  std::vector<int32_t> inverse(keys.size());
  Check(deeprec::Unique(keys.data(), keys.size(), unique.data(), inverse.data(), counts.data()) == 4, "unique");
  for (uint64_t key : {uint64_t{0}, ~uint64_t{0}, uint64_t{1} << 63, uint64_t{123456789}}) {
    Check(deeprec::Unmix64(deeprec::Mix64(key)) == key, "Unmix64 is the inverse of Mix64");
  }
}

// Fused lookups by several callers at once: bags of any length of several tables, single ids, and an empty table.
void Lookups() {
  constexpr size_t kWidth = 16, kRows = 5000, kBags = 3000;
  std::vector<int32_t> numbers, ends;
  for (size_t bag = 0, id = 0; bag < kBags; ++bag) {
    for (size_t i = 0; i < bag % 9; ++i) numbers.push_back(static_cast<int32_t>(id++ * 7919 % kRows));
    ends.push_back(static_cast<int32_t>(numbers.size()));
  }
  std::vector<int32_t> single(kBags);
  for (size_t i = 0; i < kBags; ++i) single[i] = static_cast<int32_t>(kRows + i % 10);
  using deeprec::Combiner;
  const std::vector<deeprec::LookupCall> calls{
      {numbers.data(), ends.data(), kBags, 0, 0, 0, kRows, Combiner::kMean},
      {single.data(), nullptr, 0, 1, kBags, kRows, kRows, Combiner::kSum},
      {single.data(), nullptr, kBags, 1, kBags, kRows, kRows + 10, Combiner::kSum},
  };
  const std::vector<float> rows((kRows + 10) * kWidth, 2.0f);
  const auto work = [&] {
    std::vector<float> outputs(2 * kBags * kWidth);
    deeprec::SumBags(calls, rows.data(), kWidth, outputs.data());
    for (size_t bag = 0; bag < kBags; ++bag) {
      Check(outputs[bag * kWidth] == (bag % 9 == 0 ? 0.0f : 2.0f), "the mean of equal rows");
    }
    std::vector<float> gradients((kRows + 10) * kWidth);
    const std::vector<deeprec::LookupGradient> parts{{calls, outputs.data()}, {calls, outputs.data()}};
    const float sum = deeprec::SumByRow(parts, kRows + 10, kWidth, gradients.data());
    Check(gradients[kRows * kWidth] == 2 * 2.0f * kBags / 10, "a row's gradient is that of its ids");
    Check(sum > 0, "the sum of all");
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back(work);
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main(int argc, char** argv) {
  deeprec::SetNumThreads(4);
  Edges();
  Lookups();
  const double seconds = argc > 1 ? std::atof(argv[1]) : 3.0;
  Run(seconds, {});
  // Room for a third of the hot keys: rows move between tiers all the time, in the background too.
  using deeprec::TierKind;
  const uint64_t few = 64 * 20 * (2 * kDim * sizeof(float) + 16);
  const char* temporary = std::getenv("TMPDIR");
  const std::string path = temporary == nullptr ? "/tmp" : temporary;
  const std::vector<deeprec::TierConfig> tiers{
      {TierKind::kDram, few, ""}, {TierKind::kPmemFile, 2 << 20, path}, {TierKind::kSsd, 0, path}};
  Run(seconds, tiers);
  const uint64_t little = 1 << 20;
  Run(seconds, {{TierKind::kDram, few, ""}, {TierKind::kPmemFile, little, path}, {TierKind::kSsd, little, path}}, true);
  Run(seconds, {{TierKind::kDram, few, ""}, {TierKind::kPmemFile, little, path}}, true);
  try {
    Run(seconds, {{TierKind::kDram, few, ""}, {TierKind::kLevelDb, 0, path}});
  } catch (const std::invalid_argument& error) {
    std::printf("%s\n", error.what());  // it is not installed
  }
  ledger::Run(seconds, {}, false, Check);
  ledger::Run(seconds, tiers, false, Check);
  ledger::Run(seconds, tiers, true, Check);
  ledger::Run(seconds, tiers, true, Check, /*by_rank=*/true);
  std::printf("ok\n");
  return 0;
}
