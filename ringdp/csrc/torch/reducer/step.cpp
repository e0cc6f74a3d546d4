#include "torch/reducer/step.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "torch/backend/future_wait.h"
#include "torch/reducer/messages.h"

namespace ringdp {

void JoinShadow::set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks) {
  forward_work_ = std::move(work);
  divide_by_all_ranks_ = divide_by_all_ranks;
}

void JoinShadow::divide() {
  const auto work = std::exchange(forward_work_, nullptr);
  if (!work) return divide_by(0);
  work->wait();
  divide_by(divide_by_all_ranks_ ? exchange_.group.ranks() : work->result()[0].item<int64_t>());
}

void JoinShadow::divide_by(int64_t ranks_with_input) {
  const int64_t before = exchange_.group.divisor();
  exchange_.group.set_divisor(ranks_with_input);
  if (before != ranks_with_input) plan_.reductions.set_divisor(ranks_with_input);
}

std::vector<c10d::GradBucket> JoinShadow::zero_buckets() {
  buckets_.allocate();
  std::vector<c10d::GradBucket> result;
  for (const Bucket& bucket : buckets_.store) {
    at::Tensor zeros = buckets_.store.zeros(bucket.index, exchange_.buckets.hooked(bucket));
    result.push_back(exchange_.buckets.describe(bucket, std::move(zeros), buckets_.store.size()));
  }
  return result;
}

FuturePointer JoinShadow::shadow(c10d::GradBucket& zeros) {
  TORCH_CHECK(zeros.getIndex() < buckets_.store.size(), "bucket ", zeros.getIndex(), " is out of range: there are ",
              buckets_.store.size());
  return exchange_.buckets.shadow(buckets_.store[zeros.getIndex()], zeros, exchange_.step);
}

void JoinShadow::shadow_used_map() {
  if (buckets_.sends_used_map()) ringdp::shadow_used_map(plan_.parameters, exchange_.group, exchange_.used);
}

Step::Step(Plan& plan, Exchange& exchange, Buckets& buckets, StepReport& report, bool joining)
    : plan_(plan),
      exchange_(exchange),
      buckets_(buckets),
      report_(report),
      joining_(joining),
      arrivals_(plan.buckets, plan.graph, joining ? buckets.store.size() : plan.buckets.kept()),
      used_(plan, arrivals_, exchange.group, exchange.used) {}

// ---- Gradients.

void Step::begin() {
  for (const std::size_t i : never_to_come()) {
    write(i);
    mark_ready(i);
  }
}

std::vector<std::size_t> Step::never_to_come() const {
  if (plan_.graph.learned) return plan_.graph.unexpected();
  const bool shown = plan_.options.unused == UnusedParameters::kExpected && plan_.options.graph_shows_unused;
  return shown && !plan_.graph.on ? buckets_.hooks.not_in_graph() : std::vector<std::size_t>();
}

void Step::arrived(std::size_t parameter) {
  const ModuleParameter& described = plan_.parameters[parameter];
  switch (arrivals_.arrived(parameter)) {
    case Arrivals::Arrival::kOneOfSeveral:
      return;
    case Arrivals::Arrival::kUnexpected:
      TORCH_CHECK(false, unexpected_text(described.name));
    case Arrivals::Arrival::kTwice:
      TORCH_CHECK(false, marked_twice_text(parameter, described.name, described.used_in));
    case Arrivals::Arrival::kComplete:
      write(parameter);
      mark_ready(parameter);
  }
}

// Its part of the bucket becomes this rank's gradient, or zeros if it has none. `late`: the bucket was not sent during
// backward.
void Step::write(std::size_t parameter, bool late) {
  const bool used = plan_.parameters.tensors()[parameter].grad().defined();
  arrivals_.note_used(parameter, used);
  buckets_.left_over.averaged(parameter);
  // with one rank .grad stays, except for the factor of micro-batches
  if (exchange_.local()) return buckets_.store.multiply(parameter);
  const std::size_t bucket = plan_.buckets.bucket_of(parameter);
  if (!used && bucket >= arrivals_.sending() && !late) return;  // the bucket may not be sent
  exchange_.failure.keeping_in(static_cast<int64_t>(bucket), buckets_.store[bucket].name,
                               [&] { buckets_.store.write(parameter); });
}

void Step::mark_ready(std::size_t parameter) {
  if (!arrivals_.mark_ready(parameter) || exchange_.local()) return;
  while (const auto next = arrivals_.next_full()) launch(buckets_.store[*next]);
}

void Step::launch(Bucket& bucket) {
  const UnitScope unit;
  exchange_.failure.keeping_in(static_cast<int64_t>(bucket.index), bucket.name, [&] {
    if (bucket.marks.defined()) used_.write(bucket.marks);
    if (arrivals_.sent() == 0) report_.note_first_launch();
    arrivals_.note_sent(bucket.index);  // also if it fails: the others have received this rank's part, or its failure
    report_.add_gradients(bucket);
    if (!buckets_.repair.on() || buckets_.repair.keep(bucket)) send(bucket, exchange_.forwards.note());
  });
}

// `note`: see Forwards. It is in the name of the first bucket and of the map, since a hook may reduce buckets
// elsewhere.
void Step::send(Bucket& bucket, const std::string& note) {
  exchange_.buckets.launch(bucket, exchange_.step, arrivals_.sending(), bucket.index == 0 ? note : std::string());
  // A hook's callbacks may issue further operations, at a different time on every rank.
  const bool last = bucket.index + 1 == arrivals_.sending();
  if (last && !exchange_.calls_back() && buckets_.sends_used_map()) used_.launch(note);
}

// ---- The end of backward.

bool Step::complete() {
  const bool complete = arrivals_.complete(plan_.required());
  ended_short_ = !complete;
  return complete;
}

void Step::finish() {
  gradients_done_ = StepTimes::Clock::now();
  report_.computed(gradients_done_);
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (!arrivals_.ready(i)) write(i);
    if (!arrivals_.used(i)) missing_.push_back(i);
  }
  arrivals_.graph_learned();
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (!arrivals_.ready(i)) mark_ready(i);
  }
}

void Step::wait_for(std::size_t first, std::size_t end) {
  for (std::size_t index = first; index < end; ++index) {
    Bucket& bucket = buckets_.store[index];
    exchange_.failure.keeping_in(static_cast<int64_t>(index), bucket.name, [&] { exchange_.buckets.wait(bucket); });
  }
}

void Step::wait_for_means(ReducerLock& lock) {
  wait_for_sent(lock);
  wait_for_late(lock);
}

void Step::wait_for_sent(ReducerLock& lock) {
  const auto report = report_.under_way();
  lock.unlock();
  wait_for(0, arrivals_.sending());
  if (report) exchange_.failure.keeping_in(-1, "step report", [&] { report->wait(); });
  lock.lock();
}

// Reads which parameters some rank has used, and sends the late buckets that follow from this.
void Step::wait_for_late(ReducerLock& lock) {
  read_used_map();
  if (plan_.buckets.kept() == buckets_.store.size()) return;
  send_late();
  lock.unlock();
  wait_for(arrivals_.sending(), buckets_.store.size());
  lock.lock();
}

// Of the last kept bucket, also before the step counts (StepRepair).
at::Tensor Step::reduced_marks() const {
  const Bucket& bucket = buckets_.store[plan_.buckets.kept() - 1];
  if (!bucket.marks.defined() || !bucket.result.defined()) return bucket.marks;
  return bucket.result.narrow(0, bucket.gradients.numel(), bucket.marks.numel());
}

// A hook's bucket has no room for marks, and its operations have ended by now.
void Step::read_used_map() {
  exchange_.failure.keeping_in(-1, "which parameters were used", [&] {
    if (exchange_.calls_back() && buckets_.sends_used_map() && !buckets_.repair.on())
      used_.launch(exchange_.forwards.note());
    used_.read(reduced_marks(), !missing_.empty() || plan_.may_skip(), exchange_.step, joining_);
  });
}

// Sends the buckets that were not sent during backward, and for which some rank has a gradient. All ranks have read the
// same map.
void Step::send_late() {
  report_.count_kept();
  for (std::size_t index = plan_.buckets.kept(); index < buckets_.store.size(); ++index) {
    Bucket& bucket = buckets_.store[index];
    const auto used = [&](std::size_t member) { return used_.somewhere().empty() || used_.somewhere()[member]; };
    const bool sent = index < arrivals_.sending();
    if (!sent && std::none_of(bucket.members.begin(), bucket.members.end(), used)) continue;
    report_.count_bucket(index);
    if (sent) continue;
    for (std::size_t member : bucket.members) {
      if (!arrivals_.used(member)) write(member, /*late=*/true);
    }
    launch(bucket);
  }
}

void Step::hand_out(ReducerLock& lock, HookVerdicts& hooks, bool keep_none) {
  hooks = HookVerdicts(plan_.reductions, buckets_.store, exchange_.step);
  lock.unlock();
  exchange_.failure.keeping_in(-1, "announced before", [&] { exchange_.buckets.follow_announcements(exchange_.step); });
  hooks.ask();
  lock.lock();
  exchange_.overflow.collect(buckets_.store, exchange_.step, hooks,
                             /*look_at_results=*/!exchange_.buckets.has_hook());
  exchange_.compression.commit(used_, exchange_.overflow);
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (used_.used_somewhere(i)) buckets_.store.hand_out(i, arrivals_.used(i) || keep_none);
  }
  buckets_.store.end_backward();
  exchange_.failure.keeping_in(-1, "which ranks lack gradients",
                               [&] { used_.warn(missing_, exchange_.step, joining_); });
}

void Step::wait_for_futures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  for (auto& future : futures) {
    wait_until_complete(*future, std::chrono::milliseconds(0));
    future->wait();
  }
  int64_t missing_bytes = 0;
  for (std::size_t i : missing_) missing_bytes += static_cast<int64_t>(plan_.buckets.gradients()[i].bytes());
  report_.finished(gradients_done_, missing_bytes, joining_);
}

void Step::learn(const std::vector<int32_t>& order) {
  if (!order.empty()) plan_.buckets.learn(order);
}

// ---- In an elastic job.

void Step::send_again() {
  report_.drop();  // it is reported in the next window
  used_.drop_operations();
  buckets_.repair.restore();
  exchange_.failure.keeping_in(-1, "weights", [&] { exchange_.weights.exchange_again(exchange_.step); });
  for (std::size_t index = 0; index < arrivals_.sending(); ++index) {
    Bucket& bucket = buckets_.store[index];
    bucket.factors = exchange_.weights.factors().of_ranks;
    exchange_.failure.keeping_in(static_cast<int64_t>(index), bucket.name, [&] { send(bucket); });
  }
  for (std::size_t index = arrivals_.sending(); index < buckets_.store.size(); ++index)
    buckets_.store[index].sent_in = 0;  // fewer ranks may have no gradient for it
}

void Step::wait_for_members(ReducerLock& lock) {
  wait_for_sent(lock);
  lock.unlock();
  exchange_.failure.keeping_in(-1, "which parameters were used", [&] {
    if (exchange_.calls_back() && buckets_.sends_used_map()) used_.launch();
    used_.wait();
  });
  lock.lock();
  wait_for_late(lock);
  learned_order_ = ask_for_order();
}

void Step::accept() {
  buckets_.repair.accept();
  learn(learned_order_);
}

// ---- Of a backward that has not ended.

void Step::throw_unfinished(bool notify) {
  const ReducerGroup& group = exchange_.group;
  const std::vector<std::string>& names = plan_.parameters.names();
  UnfinishedBackward unfinished;
  unfinished.missing = arrivals_.unfinished();
  if (notify && peer_report_.empty()) {
    peer_report_ = exchange_.group.notify_others(unfinished_notice(exchange_.step, unfinished.missing, names),
                                                 group.control_device(plan_.parameters.tensors().front()));
  }
  unfinished.step = exchange_.step;
  unfinished.rank = group.rank();
  unfinished.ranks = group.ranks();
  unfinished.sent = arrivals_.sent();
  unfinished.sending = arrivals_.sending();
  unfinished.ended_short = ended_short_;
  unfinished.static_graph = plan_.graph.on;
  unfinished.peer_report = peer_report_;
  TORCH_CHECK(false, unfinished_text(unfinished, names));
}

}  // namespace ringdp
