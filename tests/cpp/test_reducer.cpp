// The parts of the reducer that know no torch: what it tells its user.
#include <string>
#include <vector>

#include "testing.h"
#include "torch/reducer/messages.h"

namespace ringdp {
namespace {

using Numbers = std::vector<std::size_t>;
using Names = std::vector<std::string>;

const Names kNames{"a", "b", "c", "d"};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

CASE("ranks are listed as ranges") {
  CHECK_EQ(describe_ranks({true, false, true, false, true, true, true}, true), "ranks 0, 2, 4-6");
  CHECK_EQ(describe_ranks({true, false, true, true}, true), "ranks 0, 2, 3");
  CHECK_EQ(describe_ranks({true, false, true}, false), "rank 1");
  CHECK_EQ(describe_ranks({true}, false), "no rank");
}

CASE("a long list of names says how many it leaves out, and two lists never read the same") {
  Names names;
  Numbers all;
  for (std::size_t i = 0; i < 100; ++i) {
    names.push_back("layer" + std::to_string(i) + ".weight");
    all.push_back(i);
  }
  const std::string text = describe_names(all, names);
  CHECK(text.size() < 260);
  CHECK(contains(text, "layer0.weight, layer1.weight"));
  CHECK(contains(text, " more ["));
  names.back() = "another";
  CHECK(describe_names(all, names) != text);
  CHECK_EQ(describe_bucket(3, Numbers{1, 0}, kNames), "bucket 3: b, a");
  CHECK_EQ(listed(names).substr(0, 14), "layer0.weight,");
  CHECK(contains(listed(names), "layer19.weight, … 80 more"));
}

CASE("parameters without gradient: what becomes of them is said by rank where it is known") {
  CHECK_EQ(unused_here({1, 2}, {}, kNames), "Used on other ranks, so their mean counts zeros from this one: b, c.");
  CHECK_EQ(unused_here({1, 2}, {true, true, false, true}, kNames),
           "Used on other ranks, so their mean counts zeros from this one: b. "
           "Used on no rank, so their .grad stays None: c.");
  CHECK_EQ(unused_by_ranks({{1, 1, 0, 1}, {1, 0, 0, 1}}, kNames),
           "b on rank 1; used on rank 0, and their mean counts zeros from the others. "
           "Used on no rank, so their .grad stays None: c.");
  CHECK_EQ(unused_by_ranks({{1, 1, 1, 1}, {1, 0, 1, 1}}, kNames),
           "b on rank 1; used on rank 0, and their mean counts zeros from the others.");
}

CASE("ranks that disagree about requires_grad are named with the parameters") {
  CHECK(requires_grad_disagreement({{true, false, true, true}, {true, false, true, true}}, kNames).text.empty());
  const Disagreement found =
      requires_grad_disagreement({{true, true, false, true}, {true, false, false, true}}, kNames);
  CHECK_EQ(found.text, "the ranks disagree about requires_grad: b requires grad on rank 0 and not on rank 1.");
  CHECK_EQ(found.first_name, "b");
}

CASE("a backward that did not end: DDP's error where gradients are missing, an exception otherwise") {
  UnfinishedBackward backward;
  backward.step = 7;
  backward.rank = 1;
  backward.ranks = 2;
  backward.sent = 1;
  backward.sending = 3;
  backward.missing = {2};
  const std::string left = unfinished_text(backward, kNames);
  CHECK(contains(left, "The backward of step 7 did not come to its end on rank 1"));
  CHECK(contains(left, "It had sent 1 of 3 buckets. Ranks whose backward goes on wait for the others."));
  CHECK(contains(left, "\nParameter indices which did not receive grad for rank 1: 2\n"));
  backward.missing.clear();
  CHECK(!contains(unfinished_text(backward, kNames), "did not receive grad"));
  backward.missing = {0, 3};
  backward.ended_short = true;
  backward.peer_report = " The others stopped.";
  const std::string missing = unfinished_text(backward, kNames);
  CHECK(contains(missing, "find_unused_parameters=True"));
  CHECK(contains(missing, "did not receive grad for rank 1: a, d\nThe others stopped."));
  CHECK(!contains(missing, "did not come to its end"));
  backward.static_graph = true;
  CHECK(contains(unfinished_text(backward, kNames), "your training graph has changed"));
  CHECK_EQ(unfinished_notice(7, {0, 3}, kNames), "backward of step 7 did not end: no gradient for a, d");
  CHECK_EQ(unfinished_notice(7, {}, kNames), "backward of step 7 did not end");
}

CASE("a gradient that came twice is named with the modules that use it") {
  CHECK(contains(marked_twice_text(2, "c", ""), "Parameter at index 2 with name c has been marked as ready twice"));
  CHECK(contains(marked_twice_text(2, "c", "block (Linear)"), " It is used in block (Linear)."));
}

}  // namespace
}  // namespace ringdp
