#include "maintenance.h"

#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "table.h"

namespace deeprec {
namespace {

class Maintainer {
 public:
  void Register(Table* table) {
    std::lock_guard<std::mutex> lock(mutex_);
    tables_.insert(table);
    if (!started_) {
      started_ = true;
      std::thread([this] { Run(); }).detach();
    }
  }

  void Unregister(Table* table) {
    std::unique_lock<std::mutex> lock(mutex_);
    tables_.erase(table);
    requested_.erase(table);
    changed_.wait(lock, [&] { return busy_ != table; });
  }

  void Request(Table* table) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (tables_.count(table) == 0 || !requested_.insert(table).second) return;
    }
    changed_.notify_all();
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !requested_.empty(); });
      busy_ = *requested_.begin();
      requested_.erase(requested_.begin());
      lock.unlock();
      const bool worked = busy_->MaintainInBackground();
      lock.lock();
      if (worked && tables_.count(busy_) != 0) requested_.insert(busy_);  // there may be more to do
      busy_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Table*> tables_, requested_;
  Table* busy_ = nullptr;
  bool started_ = false;
};

// Never destroyed: its thread may outlive static destruction. A forked child, which has no such thread, starts anew.
Maintainer& TheMaintainer() {
  static std::mutex mutex;
  static Maintainer* maintainer = nullptr;
  static unsigned generation = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (maintainer == nullptr || generation != ForkGeneration()) {
    maintainer = new Maintainer;
    generation = ForkGeneration();
  }
  return *maintainer;
}

}  // namespace

void RegisterForMaintenance(Table* table) { TheMaintainer().Register(table); }
void UnregisterFromMaintenance(Table* table) { TheMaintainer().Unregister(table); }
void RequestMaintenance(Table* table) { TheMaintainer().Request(table); }

}  // namespace deeprec
