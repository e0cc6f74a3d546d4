// RecordTree: what each rank reads and sets, that all get the texts of all, and whom they wait for; blocks: that they
// are short where texts are alike, and that no bytes in the place of one do harm.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "meet/record_tree.h"
#include "testing.h"

using namespace ringdp;
using namespace ringdp::testing;

namespace {

std::string text_of(int rank) {
  return write_record(
      {{"host", "node" + std::to_string(rank / 4)}, {"pid", std::to_string(1000 + rank)}, {"site", ""}});
}

// Counts what one rank reads and sets.
class CountedStore final : public Store {
 public:
  explicit CountedStore(MemoryStore& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override {
    ++sets;
    store_.set(key, value);
  }
  std::string set_first(const std::string& key, const std::string& value) override {
    return store_.set_first(key, value);
  }
  std::optional<std::string> find(const std::string& key) override {
    auto value = store_.find(key);
    if (value) read.insert(key);
    return value;
  }

  int sets = 0;
  std::set<std::string> read;

 private:
  MemoryStore& store_;
};

struct Ranks {
  explicit Ranks(int world) {
    for (int rank = 0; rank < world; ++rank) {
      stores.push_back(std::make_unique<CountedStore>(store));
      trees.push_back(std::make_unique<RecordTree>(*stores.back(), "who", rank, world));
    }
  }

  MemoryStore store;
  std::vector<std::unique_ptr<CountedStore>> stores;
  std::vector<std::unique_ptr<RecordTree>> trees;
};

}  // namespace

CASE("each rank but rank 0 is read by one, which has it and those after it") {
  for (int world : {2, 7, 8, 9, 63, 64, 65, 100, 513, 10'000}) {
    std::vector<int> parents(static_cast<std::size_t>(world), 0);
    for (int rank = 0; rank < world; ++rank) {
      int next = rank + 1;
      for (int child : RecordTree::children_of(rank, world)) {
        CHECK_EQ(child, next);
        next = RecordTree::end_of(child, world);
        ++parents[static_cast<std::size_t>(child)];
      }
      CHECK_EQ(next, RecordTree::end_of(rank, world));
    }
    CHECK_EQ(std::count(parents.begin() + 1, parents.end(), 1), world - 1);
    CHECK_EQ(parents.front(), 0);
  }
}

CASE("all ranks get the texts of all, in whatever order they come") {
  std::mt19937 random(7);
  for (int world : {2, 8, 9, 20, 100, 520}) {
    Ranks ranks(world);
    std::vector<std::map<int, std::string>> found(static_cast<std::size_t>(world));
    std::vector<char> said(static_cast<std::size_t>(world), 0);
    std::uniform_int_distribution<int> any(0, world - 1);
    int complete = 0;
    for (int steps = 0; complete < world; ++steps) {
      REQUIRE(steps < 1000 * world);
      const int rank = any(random);
      const auto at = static_cast<std::size_t>(rank);
      if (ranks.trees[at]->complete()) continue;
      if (!said[at]) ranks.trees[at]->set(text_of(rank));
      said[at] = 1;
      found[at][rank] = text_of(rank);
      const RecordTree::Found now = ranks.trees[at]->step(random() % 2 == 0);
      CHECK_EQ(now.unreadable, -1);
      for (const auto& [of, text] : now.texts) found[at][of] = text;
      complete += ranks.trees[at]->complete() ? 1 : 0;
    }
    int levels = 0;
    for (int width = 1; width < world; width *= 8) ++levels;
    for (int rank = 0; rank < world; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      REQUIRE(static_cast<int>(found[at].size()) == world);
      int right = 0;
      for (int of = 0; of < world; ++of) right += found[at][of] == text_of(of) ? 1 : 0;
      CHECK_EQ(right, world);
      CHECK(ranks.stores[at]->sets <= 2);
      CHECK(static_cast<int>(ranks.stores[at]->read.size()) <= 2 * 7 * levels + 1);
    }
  }
}

CASE("who did not come is found, and who came and does not pass on") {
  constexpr int kWorld = 100;
  const std::set<int> absent{13, 70}, silent{24};
  Ranks ranks(kWorld);
  for (int rank = 0; rank < kWorld; ++rank)
    if (!absent.contains(rank)) ranks.trees[static_cast<std::size_t>(rank)]->set(text_of(rank));
  for (int round = 0; round < 5; ++round)
    for (int rank = 0; rank < kWorld; ++rank)
      if (!absent.contains(rank) && !silent.contains(rank)) ranks.trees[static_cast<std::size_t>(rank)]->step(true);
  const RecordTree::Awaited awaited = ranks.trees[50]->awaited(100);
  CHECK(awaited.absent == std::vector<int>({13, 70}));
  CHECK(awaited.silent == std::vector<int>({24}));
  CHECK_EQ(ranks.trees[50]->awaited(1).absent.size(), 1UL);
}

CASE("blocks give back what was joined, and are short where lines are alike") {
  const std::vector<std::string> odd{"a=1\nb=\xc3\xa4\n", "", "a=1\nb=\xc3\xb6\nc=3\n", "=5\n7:\n", "a=1\n", "a=1\n"};
  const auto back = split_texts(join_texts(odd), odd.size());
  REQUIRE(back.has_value());
  CHECK(*back == odd);
  std::vector<std::string> alike;
  for (int rank = 0; rank < 800; ++rank) alike.push_back(text_of(rank) + "long=" + std::string(200, 'x') + "\n");
  const std::string block = join_texts(alike);
  CHECK(block.size() < 20 * alike.size());
  CHECK(split_texts(block, alike.size()) == alike);
}

CASE("no bytes in the place of a block do harm") {
  for (const char* wrong :
       {"x", "x\n\n", "0:a", "0:a\n", "1:a\n\n", "=1\n\n", "=0\n\n", ":a\n\n", "-1:a\n\n", "9223372036854775808:\n\n",
        "0:a\n\n=2\n\n", "0:a\n\n=9223372036854775807\n\n", "0:a\n\n0:b\n\n0:c\n\n", "=\n\n", ""})
    CHECK(!split_texts(wrong, 2).has_value());
  const std::string large = "0:" + std::string(70'000, 'x') + "\n\n\n";
  CHECK(!split_texts(large, 2).has_value());  // no rank asks for so much memory of all others
  std::vector<std::string> texts;
  for (int rank = 0; rank < 40; ++rank) texts.push_back(text_of(rank));
  const std::string block = join_texts(texts);
  std::mt19937 random(3);
  int read = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string changed = block;
    for (auto changes = 1 + random() % 4; changes > 0; --changes)
      changed[random() % changed.size()] = static_cast<char>(random() % 256);
    if (random() % 4 == 0) changed.resize(random() % changed.size());
    if (const auto found = split_texts(changed, texts.size())) {
      ++read;
      CHECK_EQ(found->size(), texts.size());
    }
  }
  CHECK(read > 0 && read < 20'000);
}
