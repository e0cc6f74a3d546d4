// Exchange: what the ranks of an NCCL communicator send each other. In each round every rank gives some buffers and
// gets those of all. A round ends as NCCL's kernels do: when all ranks are in it with the same operation, or by an
// abort; a rank that is gone, late or in another operation is waited for. A socket between each two ranks, on this
// host. Owned by the backend and by its rounds in flight; any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "machine.h"

namespace fake_cuda {

class Exchange {
 public:
  using Bytes = std::vector<std::byte>;
  struct Part {
    std::string what;  // the operation: compared
    std::vector<Bytes> buffers;
  };

  Exchange(int rank, int size) : rank_(rank), size_(size), links_(static_cast<std::size_t>(size)) {}
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Blocks until all ranks are connected; throws after the timeout, or at an abort.
  void connect(c10d::Store& store, std::chrono::milliseconds timeout);
  // A stream has that round's task before this mark, and may be lazy: it is asked for once another rank is in the
  // round.
  void expect(uint64_t round, MarkPointer mark);
  // The parts of all ranks, by rank; empty after an abort. `late` is called if it has not ended by then.
  std::vector<Part> swap(uint64_t round, Part mine, std::chrono::milliseconds timeout,
                         const std::function<void()>& late);
  void abort();  // returns when no round is in flight

 private:
  struct Link {
    int socket = -1;
    std::map<uint64_t, Part> arrived;
  };

  bool all_in(uint64_t round, const std::string& what) const;
  void read(Link& link);
  void arrive(Link& link, uint64_t round, Part part);

  const int rank_, size_;
  std::vector<Link> links_;  // [rank]; this rank's is not used
  std::vector<std::thread> readers_;
  std::mutex sending_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, MarkPointer> expected_;
  bool aborted_ = false;
  int in_flight_ = 0;
};

}  // namespace fake_cuda
