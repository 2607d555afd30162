// Snapshots during updates, where every row is a ledger: after u updates with gradient 1 under a momentum of 1, its
// slot is -u, its value -u (u + 1) / 2 (whole numbers, exact), its version u, and its frequency u, or u + 1 between
// lookup and update (of a row that grows, the second half begins later). A snapshot that caught a row half-way, or
// copied it too late, breaks one of these. All rows of a worker in one shard are updated under one lock, so a snapshot
// must have all of them after the same update, or none.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "snapshot.h"
#include "table.h"

namespace ledger {

using deeprec::KeySpan;
using deeprec::Snapshot;
using deeprec::Table;

constexpr size_t kDim = 8;
constexpr int64_t kWorkers = 3;
constexpr int64_t kKeys = 3000;   // a key belongs to worker key % kWorkers
constexpr int64_t kUpdates = 50;  // then the worker removes its rows and starts anew

struct Row {
  int64_t frequency, version;
  float value, slot;
  bool operator==(const Row& other) const {
    return frequency == other.frequency && version == other.version && value == other.value && slot == other.slot;
  }
};
using Rows = std::map<int64_t, Row>;

template <class CheckThat>
Rows Parse(const std::vector<int64_t>& keys, const std::vector<int64_t>& frequency, const std::vector<int64_t>& version,
           const std::vector<float>& value, const std::vector<float>& slot, CheckThat&& check) {
  Rows rows;
  for (size_t i = 0; i < keys.size(); ++i) {
    const int64_t updates = std::max<int64_t>(version[i], 0);
    for (size_t k = 0; k < kDim; ++k) {
      const float own = slot[i * kDim + k];
      check(k >= kDim / 2 || own == static_cast<float>(-updates), "a slot is of another moment than its version");
      check(own == slot[i * kDim + (k < kDim / 2 ? 0 : kDim - 1)], "a row is torn");
      check(value[i * kDim + k] == (own - own * own) / 2, "a value is of another moment than its slot");
    }
    check(frequency[i] == updates || frequency[i] == updates + 1, "a frequency is of another moment than its version");
    rows[keys[i]] = {frequency[i], version[i], value[i * kDim], slot[i * kDim]};
  }
  return rows;
}

template <class Read, class CheckThat>
Rows ReadRows(size_t n, CheckThat&& check, Read&& read) {
  std::vector<int64_t> keys(n), frequency(n), version(n);
  std::vector<float> value(n * kDim), slot(n * kDim);
  deeprec::RowColumns columns;
  columns.frequency = frequency.data();
  columns.version = version.data();
  columns.value = value.data();
  columns.slots = {slot.data()};
  read(&keys, columns);
  return Parse(keys, frequency, version, value, slot, check);
}

// Takes a snapshot into `copy`; gives some up half read.
template <class CheckThat>
bool Take(Table& table, bool changed_only, bool give_up, Rows* copy, CheckThat&& check) {
  Snapshot snapshot(&table, changed_only);
  const size_t n = give_up ? snapshot.num_rows() / 2 : snapshot.num_rows();
  const Rows rows = ReadRows(n, check, [&](std::vector<int64_t>* keys, const deeprec::RowColumns& columns) {
    for (size_t begin = 0; begin < n; begin += 700) {
      deeprec::RowColumns part = columns;
      part.frequency += begin;
      part.version += begin;
      part.value += begin * kDim;
      part.slots[0] += begin * kDim;
      snapshot.Read(begin, std::min<size_t>(700, n - begin), keys->data() + begin, part);
    }
  });
  if (give_up) return false;
  if (!changed_only) copy->clear();
  for (const int64_t key : snapshot.Tombstones()) copy->erase(key);
  for (const auto& [key, row] : rows) (*copy)[key] = row;
  std::map<std::pair<int64_t, int>, std::pair<int64_t, int64_t>> groups;  // (worker, shard): version, rows
  for (const auto& [key, row] : *copy) {
    const int shard = deeprec::ShardOf(deeprec::Mix64(static_cast<uint64_t>(key)));
    auto& group = groups.emplace(std::pair(key % kWorkers, shard), std::pair(row.version, 0)).first->second;
    check(group.first == row.version, "a snapshot has half of an update");
    ++group.second;
  }
  for (int64_t key = 0; key < kKeys; ++key) {
    const int shard = deeprec::ShardOf(deeprec::Mix64(static_cast<uint64_t>(key)));
    if (groups.count({key % kWorkers, shard}) != 0) check(copy->count(key) != 0, "a snapshot lacks a row");
  }
  return true;
}

template <class CheckThat>
void Run(double seconds, const std::vector<deeprec::TierConfig>& tiers, bool grows, CheckThat&& check,
         bool by_rank = false) {
  const deeprec::Optimizer optimizer("SGD", {{"learning_rate", 1}, {"momentum", 1}, {"nesterov", 0}});
  deeprec::TableConfig config{kDim, {}, optimizer, deeprec::Initializer("Constant", 0, 0, 1)};
  config.tiers = tiers;
  if (grows) {
    config.block.blocks = 2;
    if (!by_rank) config.block.thresholds = {10};
    config.block.by_rank = by_rank;
  }
  Table table(config);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int64_t worker = 0; worker < kWorkers; ++worker) {
    threads.emplace_back([&, worker] {
      std::vector<int64_t> keys;
      for (int64_t key = worker; key < kKeys; key += kWorkers) keys.push_back(key);
      const KeySpan span{keys.data(), nullptr, keys.size()};
      std::vector<float> rows(keys.size() * kDim);
      const std::vector<float> gradients(rows.size(), 1);
      for (int64_t updates = 0; !stop.load(); ++updates) {
        if (updates == kUpdates) {
          check(table.Erase(span) == keys.size(), "a row was lost");
          updates = 0;
        }
        deeprec::Pull({{&table, span, rows.data()}}, true);
        deeprec::Push({{&table, span, gradients.data()}}, updates + 1, 1.0);
      }
    });
  }
  if (by_rank) {
    threads.emplace_back([&] {
      while (!stop.load()) {
        table.RefreshRanks();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
  Rows copy;
  size_t taken = 0, given_up = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  while ((elapsed() < seconds || taken < 20) && elapsed() < 100) {
    const size_t turn = taken + given_up;
    (Take(table, turn % 8 != 0, turn % 5 == 3, &copy, check) ? taken : given_up) += 1;
    if (!tiers.empty()) table.Maintain();
  }
  stop.store(true);
  for (auto& thread : threads) thread.join();
  check(Take(table, true, false, &copy, check), "the last snapshot");
  const Rows live = ReadRows(copy.size(), check, [&](std::vector<int64_t>* keys, const deeprec::RowColumns& columns) {
    std::vector<int64_t> filtered, counts;
    table.Keys(keys, &filtered, &counts);
    check(keys->size() == copy.size(), "the deltas have other rows than the table");
    std::vector<uint8_t> present(keys->size());
    table.Export({keys->data(), nullptr, keys->size()}, present.data(), columns);
  });
  check(live == copy, "full and deltas in order are not the table");
  std::printf("snapshots %zu, given up %zu\n", taken, given_up);
}

}  // namespace ledger
