// RecordTree: gathers one text of each rank through the store, for jobs in which no rank can read the keys of all
// others. Rank r has the texts of r .. r + s - 1 joined, s being the largest power of 8 that divides r (rank 0: of
// all). It reads them from at most 7 ranks for each power of 8, sets them as one block, and reads rank 0's block,
// which has all. So a rank sets two keys and reads at most 7 log8(n) + 1, of which log8(n) + 1 follow one another.
// Between calls a rank's own block is in the store exactly if its own text and those of all below it are known.
// Owned by PeerRecords, and used by its thread. Nothing blocks but the store.
//
// A block: texts of lines, each coded against the one before it, since ranks of a host differ in little
// (docs/reference/wire_format.md). Pure functions, any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "meet/store.h"

namespace ringdp {

std::string join_texts(const std::vector<std::string>& texts);
// nullopt: it is not a block of `count` texts.
std::optional<std::vector<std::string>> split_texts(const std::string& block, std::size_t count);

class RecordTree {
 public:
  static constexpr int kWays = 8;

  // The keys are `kind`/<rank> and, of blocks, `kind`s/<rank>.
  RecordTree(Store& store, std::string kind, int rank, int world);

  void set(const std::string& text);  // this rank's

  struct Found {
    std::vector<std::pair<int, std::string>> texts;  // of other ranks; one may come again
    int unreadable = -1;                             // a rank whose block is not one
  };
  // Reads what is missing now; of several keys all together, or with `singly` those that exist.
  Found step(bool singly);
  bool complete() const { return complete_; }  // the texts of all ranks were found

  struct Awaited {
    std::vector<int> absent;  // they have not set their texts
    std::vector<int> silent;  // they have not set their blocks, though all below them have
  };
  // Which ranks a block of all waits for, no more than `most`. Reads 8 keys for each rank of the way to them.
  Awaited awaited(std::size_t most) const;

  static std::vector<int> children_of(int rank, int world);
  static int end_of(int rank, int world);  // of the ranks whose texts its block has

 private:
  std::string text_key(int rank) const { return kind_ + "/" + std::to_string(rank); }
  // of what it sets last: a rank without others below it sets its text alone
  std::string block_key(int rank) const;
  void take(int child, const std::string& block, Found& found);
  void look_below(int rank, std::size_t most, Awaited& out) const;

  Store& store_;
  const std::string kind_;
  const int rank_;
  const int world_;
  std::vector<int> missing_;        // children whose blocks were not read
  std::vector<int> unseen_;         // those of them whose texts were not read either
  std::vector<std::string> below_;  // from this rank on; until they are joined
  bool set_ = false;
  bool joined_ = false;
  bool complete_ = false;
};

}  // namespace ringdp
