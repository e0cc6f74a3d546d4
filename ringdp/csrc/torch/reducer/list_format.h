// How messages list parameters and ranks. No torch; any thread.
#pragma once

#include <string>
#include <vector>

namespace ringdp {

// "a.weight, a.bias, … 7 more"
std::string listed(const std::vector<std::string>& names);

// "rank 1" or "ranks 0, 2, 4-7": those whose entry in `ranks` is `which`; "no rank".
std::string describe_ranks(const std::vector<bool>& ranks, bool which);

// Names, those with the same ranks together, in the order in which they were added.
class RankTable {
 public:
  struct Row {
    std::vector<bool> ranks;
    std::vector<std::string> names;
  };
  void add(const std::vector<bool>& ranks, const std::string& name);
  const std::vector<Row>& rows() const { return rows_; }

 private:
  std::vector<Row> rows_;
};

}  // namespace ringdp
