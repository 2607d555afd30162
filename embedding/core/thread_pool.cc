#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace deeprec {
namespace {

struct Job {
  Job(size_t tasks, const std::function<void(size_t)>& body) : tasks(tasks), body(body) {}

  // Takes tasks until none is left. The body is touched only while a task is unfinished, hence while the caller waits.
  void Work() {
    size_t finished = 0;
    for (size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks; ++finished) {
      try {
        body(task);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
    if (finished == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    done += finished;
    if (done == tasks) all_done.notify_all();
  }

  bool Exhausted() const { return next.load(std::memory_order_relaxed) >= tasks; }

  const size_t tasks;
  const std::function<void(size_t)>& body;
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::condition_variable all_done;
  size_t done = 0;
  std::exception_ptr error;
};

class Pool {
 public:
  void Submit(const std::shared_ptr<Job>& job, size_t helpers) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (threads_ < helpers) {
        std::thread([this] { Run(); }).detach();
        ++threads_;
      }
      jobs_.push_back(job);
    }
    if (helpers == 1) {
      wake_.notify_one();
    } else {
      wake_.notify_all();
    }
  }

  void Retire(const std::shared_ptr<Job>& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = std::find(jobs_.begin(), jobs_.end(), job);
    if (it != jobs_.end()) jobs_.erase(it);
  }

 private:
  void Run() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] {
          while (!jobs_.empty() && jobs_.front()->Exhausted()) jobs_.pop_front();
          return !jobs_.empty();
        });
        job = jobs_.front();
        // Several callers at once: each helper takes another job.
        std::rotate(jobs_.begin(), jobs_.begin() + 1, jobs_.end());
      }
      job->Work();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;
  size_t threads_ = 0;
};

std::atomic<Pool*> pool{nullptr};
std::atomic<size_t> num_threads{0};

// The pool is never destroyed: its threads may outlive static destruction.
Pool* GetPool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current != nullptr) return current;
  static std::once_flag at_fork;
  std::call_once(at_fork, [] { pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); }); });
  auto* fresh = new Pool;
  if (pool.compare_exchange_strong(current, fresh)) return fresh;
  delete fresh;
  return current;
}

size_t DefaultThreads() {
  if (const char* text = std::getenv("DEEPREC_NUM_THREADS")) {
    const long value = std::strtol(text, nullptr, 10);
    if (value >= 1 && value <= 1024) return static_cast<size_t>(value);
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

size_t NumThreads() {
  size_t threads = num_threads.load(std::memory_order_relaxed);
  if (threads == 0) {
    threads = DefaultThreads();
    num_threads.store(threads, std::memory_order_relaxed);
  }
  return threads;
}

void SetNumThreads(size_t threads) { num_threads.store(std::max<size_t>(threads, 1), std::memory_order_relaxed); }

void ParallelFor(size_t tasks, const std::function<void(size_t)>& body) {
  const size_t threads = std::min(NumThreads(), tasks);
  if (threads <= 1) {
    for (size_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  auto job = std::make_shared<Job>(tasks, body);
  Pool* workers = GetPool();
  workers->Submit(job, threads - 1);
  job->Work();
  workers->Retire(job);
  std::unique_lock<std::mutex> lock(job->mutex);
  job->all_done.wait(lock, [&] { return job->done == job->tasks; });
  if (job->error) std::rethrow_exception(job->error);
}

}  // namespace deeprec
