// The parts of the reducer without torch: the bucket of each gradient, the order of launching buckets, whether a
// backward synchronises, and the messages to the user.
#include <cmath>
#include <string>
#include <vector>

#include "testing.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/forwards.h"
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
  CHECK(contains(listed(names, 100), "layer5.weight, … 94 more"));
}

CASE("parameters without gradient: what becomes of them is said by rank where it is known") {
  CHECK_EQ(unused_here({1, 2}, {}, kNames), "Used on other ranks, so their mean counts zeros from this one: b, c.");
  CHECK_EQ(unused_here({1, 2}, {true, true, false, true}, kNames),
           "Used on other ranks, so their mean counts zeros from this one: b.\n"
           "Used on no rank, so their .grad stays None: c.");
  CHECK_EQ(unused_by_ranks({{1, 1, 0, 1}, {1, 0, 0, 1}}, kNames),
           "b on rank 1; used on rank 0, and their mean counts zeros from the others.\n"
           "Used on no rank, so their .grad stays None: c.");
  CHECK_EQ(unused_by_ranks({{1, 1, 1, 1}, {1, 0, 1, 1}}, kNames),
           "b on rank 1; used on rank 0, and their mean counts zeros from the others.");
}

CASE("ranks that disagree about requires_grad are named with the parameters") {
  CHECK(requires_grad_disagreement({{true, false, true, true}, {true, false, true, true}}, kNames).text.empty());
  const TrainingDisagreement found =
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

PlannedGradient gradient(std::size_t numel, uint64_t group = 0) {
  PlannedGradient one;
  one.group = group;
  one.numel = numel;
  one.element_bytes = 4;
  return one;
}

PlannedGradient alone(std::size_t numel) {
  PlannedGradient one = gradient(numel);
  one.alone = true;
  return one;
}

PlannedGradient compressed(std::size_t numel) {
  PlannedGradient one = gradient(numel, 1);
  one.exact = false;
  return one;
}

using Buckets = std::vector<BucketMembers>;

CASE("buckets close at their caps, and come in the order in which they fill up") {
  BucketPlan plan({8, 16});
  plan.start({gradient(1), gradient(2), gradient(2), gradient(2), gradient(1)});
  CHECK(plan.buckets() == (Buckets{{4, 3}, {2, 1}, {0}}));
  CHECK_EQ(plan.kept(), 3u);
  CHECK_EQ(plan.bytes(1), 16u);
  BucketPlan one({});
  one.start({gradient(1), gradient(1, /*group=*/2), gradient(1)});
  CHECK(one.buckets() == (Buckets{{1}, {2, 0}}));
}

CASE("a gradient begins at a multiple of 64 bytes of its bucket") {
  BucketPlan plan({});
  plan.start({gradient(3), gradient(17), gradient(1)});
  const BucketMemory memory = plan.memory(0);
  CHECK(memory.offsets == (Numbers{0, 16, 48}));
  CHECK(memory.lengths == (Numbers{1, 17, 3}));
  CHECK_EQ(memory.numel, 51u);
}

CASE("the last bucket is an exact one with memory of its own, where there is one") {
  BucketPlan plan({4});
  plan.start({alone(8), compressed(1), gradient(1), gradient(1)});
  CHECK(plan.buckets() == (Buckets{{3}, {1}, {0}, {2}}));
  CHECK(plan.may_carry_marks(3));
  CHECK(!plan.may_carry_marks(2));
  plan.start({compressed(1)});
  CHECK(!plan.may_carry_marks(0));
  PlannedGradient sparse = alone(8);
  sparse.sparse = true;
  plan.start({sparse});
  CHECK_EQ(plan.bytes(0), 32u);
  CHECK_EQ(plan.dense_bytes(0), 0u);
}

CASE("all ranks plan by the order in which rank 0's gradients arrived") {
  BucketPlan plan({4});
  plan.start({gradient(1), gradient(1), gradient(1), gradient(1)});
  CHECK(!plan.follow_learned());
  // Parameter 3 did not come, parameter 0 came twice.
  const std::vector<int32_t> sent = plan.order_to_send(Numbers{0, 2, 0, 1}, {});
  CHECK(sent == (std::vector<int32_t>{0, 2, 1, 3}));
  plan.learn(sent);
  CHECK(plan.order_known());
  CHECK(!plan.rebuilt());
  CHECK(plan.follow_learned() == std::optional(true));
  CHECK(plan.rebuilt());
  CHECK(plan.buckets() == (Buckets{{0}, {2}, {1}, {3}}));
  CHECK(!plan.follow_learned());
  plan.learn(sent);
  CHECK(plan.follow_learned() == std::optional(false));
  plan.describe_again({gradient(2), gradient(1), gradient(1), gradient(1)});
  CHECK(plan.buckets() == (Buckets{{0}, {2}, {1}, {3}}));
  plan.learn(sent);
  plan.forget_learned();
  CHECK(!plan.order_known() && !plan.rebuilt() && !plan.follow_learned());
  CHECK_THROWS(ErrorKind::kMismatch, plan.learn(std::vector<int32_t>{0, 1, 1, 3}));
}

CASE("parameters that no rank used share no bucket with the others, and theirs stand last") {
  BucketPlan plan({});
  plan.start({gradient(1), gradient(1), gradient(1), gradient(1)});
  const std::vector<int32_t> sent = plan.order_to_send(Numbers{3, 1}, {false, true, false, true});
  CHECK(sent == (std::vector<int32_t>{3, 1, ~2, ~0}));
  plan.learn(sent);
  CHECK(plan.follow_learned() == std::optional(true));
  CHECK(plan.buckets() == (Buckets{{3, 1}, {2, 0}}));
  CHECK_EQ(plan.kept(), 1u);
  CHECK(plan.may_carry_marks(0));
  plan.learn(std::vector<int32_t>{~3, ~1, ~2, ~0});  // none would be left
  CHECK(plan.follow_learned() == std::optional(true));
  CHECK_EQ(plan.kept(), 1u);
  CHECK(plan.buckets() == (Buckets{{3, 1, 2, 0}}));
}

using Arrival = Arrivals::Arrival;

// Buckets {3}, {2}, {1}, {0}.
BucketPlan four_buckets() {
  BucketPlan plan({4});
  plan.start({gradient(1), gradient(1), gradient(1), gradient(1)});
  return plan;
}

CASE("buckets leave in index order, each when all its gradients are there") {
  const BucketPlan plan = four_buckets();
  StaticGraph graph;
  Arrivals arrivals(plan, graph, /*sending=*/3);
  CHECK(arrivals.arrived(2) == Arrival::kComplete);
  arrivals.note_used(2, true);
  CHECK(arrivals.mark_ready(2));
  CHECK(!arrivals.next_full());  // bucket 0 is not
  CHECK(arrivals.arrived(3) == Arrival::kComplete);
  CHECK(arrivals.mark_ready(3));
  CHECK(arrivals.next_full() == std::optional<std::size_t>(0));
  arrivals.note_sent(0);
  CHECK(arrivals.next_full() == std::optional<std::size_t>(1));
  arrivals.note_sent(1);
  CHECK(!arrivals.next_full());
  CHECK(arrivals.arrived(3) == Arrival::kTwice);
  CHECK(arrivals.unfinished() == (Numbers{0, 1}));
  CHECK(arrivals.complete(/*all_required=*/false));
  CHECK(!arrivals.complete(/*all_required=*/true));
  arrivals.mark_ready(1);
  arrivals.note_sent(2);
  arrivals.mark_ready(0);
  CHECK(!arrivals.next_full());  // the fourth bucket does not leave by itself
  CHECK(arrivals.order() == (Numbers{2, 3}));
  CHECK(arrivals.used(2) && !arrivals.used(3));
}

CASE("a static graph's gradients are counted in the first backward, and the last of each is taken later") {
  const BucketPlan plan = four_buckets();
  StaticGraph graph{.on = true};
  graph.forget(4);
  CHECK(graph.learning());
  Arrivals first(plan, graph, 4);
  for (const std::size_t i : Numbers{3, 1, 3}) CHECK(first.arrived(i) == Arrival::kOneOfSeveral);
  CHECK(first.complete(true));
  first.graph_learned();
  for (std::size_t i = 0; i < 4; ++i) CHECK(first.mark_ready(i));
  CHECK(first.order() == (Numbers{3, 1}));
  CHECK(graph.unexpected() == (Numbers{0, 2}));
  Arrivals second(plan, graph, 4);
  CHECK(second.arrived(3) == Arrival::kOneOfSeveral);
  CHECK(!second.complete(true));
  CHECK(second.arrived(3) == Arrival::kComplete);
  CHECK(second.arrived(3) == Arrival::kUnexpected);
  CHECK(second.arrived(0) == Arrival::kUnexpected);
  CHECK(second.arrived(1) == Arrival::kComplete);
  CHECK(second.complete(true));
  graph.forget(4);
  CHECK(graph.learning());
}

CASE("a gradient begins a step after a forward that synchronises, and not in a backward that was told to be quiet") {
  Demand backward;
  CHECK(!backward.synchronises(5));
  auto graph = std::make_shared<int>();
  backward.arm(graph);
  CHECK(backward.due());
  backward.stay_quiet(5);
  CHECK(!backward.synchronises(5));
  CHECK(backward.synchronises(6));
  graph.reset();
  CHECK(!backward.due());
  CHECK(backward.synchronises(6));
  backward.demand();
  CHECK(backward.due());
  backward.settle();
  CHECK(!backward.due() && !backward.demanded() && !backward.synchronises(6));
}

CASE("the first micro-batch keeps its gradients; one that weighs nothing brings zeros") {
  MicroBatches batches;
  CHECK_EQ(batches.add(0), 0.0);  // whatever its gradients are
  CHECK_EQ(batches.add(8), 1.0);
  CHECK_EQ(batches.add(8), 1.0);
  CHECK_EQ(batches.add(2), 0.25);
  CHECK_EQ(batches.add(0), 0.0);
  CHECK_EQ(batches.total(), 18.0);
  // .grad has (8 g1 + 8 g2 + 2 g3) / 8; two ranks have 18 and 6 samples.
  CHECK_EQ(MicroBatches::factor(batches.reference(), 24, 2), 2 * 8.0 / 24);
  batches.clear();
  CHECK_EQ(batches.total(), 0.0);
}

CASE("equal weights change nothing, also where their sum is rounded; unequal ones do") {
  for (const double weight : {1.0, 24.0, 0.1, 1e-300, 3e200, 1.0 / 3}) {
    for (int ranks = 1; ranks < 200; ++ranks) {
      double sum = 0;
      for (int i = 0; i < ranks; ++i) sum += weight;
      MicroBatches batches;
      CHECK_EQ(batches.add(weight), 1.0);
      CHECK_EQ(MicroBatches::factor(batches.reference(), sum, ranks), 1.0);
    }
  }
  MicroBatches batches;
  batches.add(1000001);
  CHECK(MicroBatches::factor(batches.reference(), 2000001, 2) != 1.0);
}

CASE("where nothing weighs anything, gradients become zeros") {
  MicroBatches batches;
  CHECK_EQ(MicroBatches::factor(batches.reference(), 0, 2), 0.0);
  CHECK_EQ(MicroBatches::factor(batches.reference(), 5, 2), 0.0);  // the others' batches do
  CHECK_EQ(batches.add(0), 0.0);
  CHECK_EQ(MicroBatches::factor(batches.reference(), 5, 2), 0.0);
  CHECK(!MicroBatches::valid(-1) && !MicroBatches::valid(std::nan("")) && !MicroBatches::valid(INFINITY));
  CHECK(MicroBatches::valid(0));
}

// One step: forwards of which the last `followed` are gone through, and what the backward's name then ends in.
std::string note_after(Forwards& forwards, int count, int followed, bool training = true) {
  std::vector<Forward> made(static_cast<std::size_t>(count));
  for (Forward& one : made) {
    one.training = training;
    forwards.count(one, /*in_graph=*/true);
  }
  for (int i = count - followed; i < count; ++i) forwards.follow(made[static_cast<std::size_t>(i)]);
  forwards.begin(/*again=*/false);
  forwards.set_comparable(true);
  std::string note = forwards.note();
  forwards.settle();
  return note;
}

CASE("a forward without a backward is in the next backward's name, and in no later one's") {
  Forwards forwards;
  CHECK_EQ(note_after(forwards, 1, 1), "");
  const std::string note = note_after(forwards, 2, 1);
  CHECK(contains(note, "after 1 forward without a backward"));
  CHECK(!Forwards::explain("all_reduce 'bucket 0: a" + note + "'").empty());
  CHECK_EQ(note_after(forwards, 1, 1), "");
  CHECK_EQ(note_after(forwards, 3, 3), "");  // one backward through several
  CHECK(contains(note_after(forwards, 4, 1), "after 3 forwards"));
  CHECK_EQ(Forwards::explain("all_reduce 'bucket 0: a'"), "");
}

CASE("a forward in evaluation mode counts where backwards go through such") {
  Forwards forwards;
  Forward evaluated;
  evaluated.training = false;
  forwards.count(evaluated, true);
  CHECK_EQ(note_after(forwards, 1, 1), "");
  CHECK(contains(note_after(forwards, 2, 1, /*training=*/false), "after 1 forward"));
}

CASE("of forwards whose outputs are not found, a backward is that of one") {
  Forwards forwards;
  Forward one;
  const auto note = [&](int count) {
    for (int i = 0; i < count; ++i) forwards.count(one, /*in_graph=*/false);
    forwards.begin(false);
    forwards.set_comparable(true);
    std::string text = forwards.note();
    forwards.settle();
    return text;
  };
  CHECK_EQ(note(1), "");
  CHECK(contains(note(2), "after 1 forward"));
  CHECK_EQ(note(1), "");
}

CASE("a backward that was abandoned has gone through nothing, unless its batch is repeated") {
  Forwards forwards;
  const auto interrupted = [&](bool repeats) {
    Forward first;
    forwards.count(first, true);
    forwards.follow(first);
    forwards.begin(false);
    if (repeats) forwards.settle();
    forwards.abandon();
    return note_after(forwards, 1, 1);
  };
  CHECK(contains(interrupted(false), "after 1 forward"));
  CHECK_EQ(interrupted(true), "");
  Forward same;  // whose backward is tried again
  forwards.count(same, true);
  forwards.follow(same);
  forwards.begin(false);
  forwards.abandon();
  CHECK(!forwards.follow(same));
  forwards.begin(false);
  CHECK_EQ(forwards.note(), "");
}

CASE("a second backward through one forward is in its name") {
  Forwards forwards;
  forwards.set_comparable(true);
  Forward one;
  forwards.count(one, true);
  CHECK(!forwards.follow(one));
  CHECK(!forwards.follow(one));  // through another of its outputs
  forwards.begin(false);
  forwards.settle();
  const bool again = forwards.follow(one);
  CHECK(again);
  forwards.begin(again);
  CHECK(contains(forwards.note(), "second backward"));
  CHECK(!Forwards::explain(forwards.note()).empty());
}

CASE("where ranks are not to be compared, there is no note") {
  Forwards forwards;
  Forward one;
  forwards.count(one, true);
  forwards.begin(false);
  forwards.set_comparable(false);
  CHECK_EQ(forwards.note(), "");
}

CASE("a closure's evaluations are counted from the second on") {
  Forwards forwards;
  forwards.begin_closure();
  CHECK_EQ(note_after(forwards, 1, 1), "");
  const std::string note = note_after(forwards, 1, 1);
  CHECK(contains(note, "evaluation 2 of the optimizer's closure"));
  CHECK(contains(Forwards::explain(note), "LBFGS"));
  forwards.begin_closure();
  CHECK_EQ(note_after(forwards, 1, 1), "");
  forwards.end_closure();
  CHECK_EQ(note_after(forwards, 1, 1), "");
}

}  // namespace
}  // namespace ringdp
