// VotePages: the votes of the ranks of one host, in memory that outlives them: a rank writes its vote before it says it, and when
// its process is dead, the lowest rank of the host that lives reads it and answers for it (ViewConsensus::answer_for).
// A page has two halves that are written in turn, each with a number and a checksum: a rank that dies while it writes leaves the
// vote before. Owned by a LinkAgreement; one thread writes, the one that agrees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"

namespace ringdp {

class VotePages {
 public:
  static constexpr std::size_t kHalfBytes = 8192;
  static constexpr std::size_t kBytes = 2 * kHalfBytes;

  // Makes this rank's page, under a name of the job and its place in /dev/shm. Throws Error(kSystem) where there is no room.
  VotePages(const std::string& job, int place);
  ~VotePages();
  VotePages(const VotePages&) = delete;
  VotePages& operator=(const VotePages&) = delete;

  // Opens the pages of the other ranks of the host, when all have made theirs. Throws Error(kSystem) where one is missing.
  void open(const std::vector<int>& places);
  // The names go when all have opened them: then nothing is left behind, however the ranks end.
  void remove_name();

  const std::vector<int>& places() const { return places_; }  // of this host, in ascending order
  int self() const { return self_; }
  void write(int place, std::span<const std::byte> vote);
  // The vote that was written last; empty: none was. Bytes that are no vote if both halves are damaged.
  std::vector<std::byte> read(int place) const;
  // Whether the process is certainly dead, or has left and will never write again.
  bool dead(int place) const;
  void leave();  // this rank never writes again; also at the end of this object

  // For tests whose ranks are threads: in place of asking the kernel.
  void ask_instead(std::function<bool(int place)> dead) { ask_ = std::move(dead); }

 private:
  struct Page {
    std::byte* base = nullptr;
    Fd process;  // pidfd
  };
  struct Half;

  static std::string name_of(const std::string& job, int place);
  Half* half(int place, std::size_t which) const;
  int latest(int place) const;

  const std::string job_;
  const int self_;
  std::vector<int> places_;
  std::map<int, Page> pages_;
  std::function<bool(int)> ask_;
  bool named_ = false;
  unsigned generation_ = fork_generation();
};

}  // namespace ringdp
