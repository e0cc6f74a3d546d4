#include "torch/reducer/step_report.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/naming.h"
#include "codec/codec.h"
#include "engine/elastic_group.h"
#include "kernels/hash64.h"
#include "torch/backend/process_group.h"
#include "torch/backend/steps_made.h"
#include "torch/backend/work.h"
#include "torch/reducer/messages.h"

namespace ringdp {
namespace {

int64_t nanoseconds(StepTimes::Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

void StepTimes::begin() {
  began_ = Clock::now();
  stats_.began_ns = nanoseconds(began_);
  stats_.launched_ns = 0;
}

void StepTimes::note_first_launch() { stats_.launched_ns = nanoseconds(Clock::now()); }

void StepTimes::end(Clock::time_point gradients_done, int64_t unused_bytes, bool local) {
  const auto now = Clock::now();
  ++stats_.steps;
  note_steps(stats_.steps);
  stats_.computed_ns = nanoseconds(gradients_done);
  stats_.finished_ns = nanoseconds(now);
  stats_.unused_bytes = unused_bytes;
  stats_.backward_s = seconds(gradients_done - began_);
  stats_.exposed_wait_s = local ? 0 : seconds(now - gradients_done);
  stats_.total_backward_s += stats_.backward_s;
  stats_.total_exposed_wait_s += stats_.exposed_wait_s;
}

void StepTimes::count_kept(const BucketPlan& plan) {
  stats_.buckets = stats_.bytes = 0;
  for (std::size_t index = 0; index < plan.kept(); ++index) count_bucket(plan, index);
}

void StepTimes::count_bucket(const BucketPlan& plan, std::size_t bucket) {
  ++stats_.buckets;
  stats_.bytes += static_cast<int64_t>(plan.dense_bytes(bucket));
}

std::vector<BucketRow> StepReport::bucket_rows() const {
  const ReducerStats& stats = this->stats();
  std::vector<BucketRow> rows;
  for (std::size_t index = 0; index < plan_.buckets.buckets().size(); ++index) {
    const BucketMembers& members = plan_.buckets.buckets()[index];
    BucketRow& row = rows.emplace_back();
    row.index = index;
    row.name = describe_bucket(index, members, plan_.parameters.names());
    row.reduction = plan_.reductions.number_of_bucket(index);
    row.free = plan_.reductions.free(index);
    const auto* native = dynamic_cast<const CodecReduction*>(plan_.reductions.of_bucket(index));
    const bool coded = native != nullptr && native->enabled() && !plan_.reductions.too_small(index);
    for (std::size_t member : members) {
      const PlannedGradient& gradient = plan_.buckets.gradients()[member];
      row.parameters.push_back(plan_.parameters.param_index(member));
      row.numel += gradient.numel;
      row.bytes_before += gradient.bytes();
      row.bytes_after += coded ? codec(native->codec()).encoded_bytes(gradient.numel) : gradient.bytes();
    }
    if (index >= store_.size()) continue;
    const Bucket& bucket = store_[index];
    if (bucket.report) row.coding_s = static_cast<double>(bucket.report->coding_ns) * 1e-9;
    row.launched_s = static_cast<double>(nanoseconds(bucket.times.launched) - stats.launched_ns) * 1e-9;
    row.seconds = bucket.times.seconds;
    row.exposed_s = bucket.times.exposed_s;
  }
  return rows;
}

namespace {

std::atomic<StepPhases::Clock::time_point> optimizer_ended{};

float seconds_between(StepPhases::Clock::time_point from, StepPhases::Clock::time_point to) {
  return std::max(0.0F, std::chrono::duration<float>(to - from).count());
}

}  // namespace

void StepPhases::note_optimizer() { optimizer_ended.store(Clock::now(), std::memory_order_relaxed); }

void StepPhases::enter(StepField next, Clock::time_point now, int64_t waited_ns) {
  if (began_) {
    const float spent = seconds_between(since_, now);
    const float waited = std::clamp(static_cast<float>(waited_ns - waited_ns_) * 1e-9F, 0.0F, spent);
    row_[phase_] += spent - waited;
    row_[kOtherWait] += waited;
  }
  began_ = true;
  phase_ = next;
  since_ = now;
  probe_.sample();
  waited_ns_ = waited_ns;
}

void StepPhases::forward_began(Clock::time_point now, int64_t waited_ns) {
  if (phase_ == kForward) return;
  // The end of the phase before: of a backward its last gradient, of the phase after the step the optimizer.
  const Clock::time_point ended =
      phase_ == kBackward ? last_gradient_ : optimizer_ended.load(std::memory_order_relaxed);
  if (began_ && ended > since_ && ended <= now) {
    row_[phase_] += seconds_between(since_, ended);
    since_ = ended;
  }
  phase_ = kBetween;
  enter(kForward, now, waited_ns);
}

void StepPhases::backward_began(Clock::time_point now, int64_t waited_ns) {
  if (phase_ != kBackward) enter(kBackward, now, waited_ns);
}

void StepPhases::computed(Clock::time_point now, int64_t waited_ns, RunDelay delay) {
  enter(kExposed, now, waited_ns);
  const float own = row_[kBetween] + row_[kForward] + row_[kBackward] + row_[kAfter];
  row_[kOffCore] = std::min(own, static_cast<float>(delay.since(delay_)) * 1e-9F);
}

StepRow StepPhases::finished(Clock::time_point now, int64_t waited_ns, RunDelay delay) {
  row_[kExposed] = seconds_between(since_, now);
  row_[kProbe] = probe_.take_mean();
  phase_ = kAfter;
  since_ = now;
  waited_ns_ = waited_ns;
  delay_ = delay;
  const StepRow row = row_;
  row_ = {};
  return row;
}

namespace {

constexpr std::size_t kFirstSteps = 10;  // the first exchange is after so many steps

// Bytes of a bucket that are hashed.
constexpr std::size_t kPieces = 8;
constexpr std::size_t kPieceBytes = 128;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(StepPhases::Clock::now().time_since_epoch()).count();
}

template <class T>
void append(StepReport::Bytes& bytes, const T& value) {
  const auto* first = reinterpret_cast<const uint8_t*>(&value);
  bytes.insert(bytes.end(), first, first + sizeof value);
}

}  // namespace

int StepReport::note_forward() {
  if (exchange_.group.elastic() && exchanges()) follow_members();
  phases_.forward_began(Clock::now(), RingWork::waited_ns());
  take_answers();
  int answer = std::exchange(step_ended_, false) ? kStepEnded : 0;
  if (due_) answer |= kFactsWanted;
  if (window_) answer |= kWindowCame;
  return answer;
}

void StepReport::add_gradients(const Bucket& bucket) {
  const at::Tensor& gradients = bucket.gradients;
  if (every_ == 0 || bucket.sparse || !gradients.defined() || !gradients.is_cpu() || !gradients.is_contiguous()) return;
  const std::span<const std::byte> all(static_cast<const std::byte*>(gradients.const_data_ptr()), gradients.nbytes());
  const std::size_t pieces = all.size() <= kPieces * kPieceBytes ? 1 : kPieces;
  const std::size_t length = pieces == 1 ? all.size() : kPieceBytes;
  for (std::size_t i = 0; i < pieces; ++i) {
    const std::size_t offset = pieces == 1 ? 0 : (all.size() - length) / (pieces - 1) * i;
    const auto piece = all.subspan(offset, length);
    step_hash_ = hash_mix(step_hash_, hash64(piece, bucket.index));
    some_gradient_ =
        some_gradient_ || std::any_of(piece.begin(), piece.end(), [](std::byte one) { return one != std::byte{0}; });
  }
}

void StepReport::backward_began() { phases_.backward_began(Clock::now(), RingWork::waited_ns()); }

void StepReport::computed(Clock::time_point now) {
  phases_.computed(now, RingWork::waited_ns(), RunDelay::of_this_thread());
}

void StepReport::finished(Clock::time_point gradients_done, int64_t unused_bytes, bool joining) {
  times_.end(gradients_done, unused_bytes, exchange_.local());
  const ReducerStats& stats = times_.stats();
  const uint64_t hash = std::exchange(step_hash_, 0);
  const bool some_gradient = std::exchange(some_gradient_, false);
  last_ = phases_.finished(Clock::now(), RingWork::waited_ns(), RunDelay::of_this_thread());
  step_ended_ = true;
  if (stats.launched_ns > 0) last_[kOnItsWay] = static_cast<float>(stats.finished_ns - stats.launched_ns) * 1e-9F;
  for (std::size_t index = 0; index < store_.size(); ++index)
    if (const auto& report = store_[index].report; report && store_[index].sent_in == stats.steps)
      last_[kCoding] += static_cast<float>(report->coding_ns) * 1e-9F;
  if (joining || !exchanges()) return;
  follow_members();
  // Within a view all members count the same steps: not one that counts with the parts of members lost in it.
  if (exchange_.group.first_unit()) return;
  if (rows_.size() == every_) rows_.erase(rows_.begin());
  rows_.push_back(last_);
  if (some_gradient) gradients_ = {hash_mix(gradients_.hash, hash), gradients_.steps + 1};
  due_ = due(++steps_);
}

void StepReport::follow_members() {
  const auto group = exchange_.group.ring(c10::kCPU)->group();
  if (members_.lock() == group) return;
  members_ = group;
  steps_ = 0;
  due_ = false;
  rows_.clear();
  forget_gradients();
  window_.reset();
  sent_ = {};
  issued_before_ns_ = ended_before_ns_ = 0;
}

// For backends whose buckets end on the host.
bool StepReport::exchanges() const {
  if (every_ == 0 || exchange_.local() || plan_.parameters.size() == 0) return false;
  return plan_.parameters.tensors().front().is_cpu() && exchange_.group.ring(c10::kCPU) != nullptr;
}

bool StepReport::due(std::size_t steps) const {
  const std::size_t first = std::min(kFirstSteps, every_);
  return steps >= first && (steps - first) % every_ == 0;
}

void StepReport::set_facts(const Bytes& facts) {
  facts_ = facts;
  facts_.resize(kFactsBytes);
}

std::optional<std::vector<StepReport::Bytes>> StepReport::take() {
  take_answers();
  return std::exchange(window_, std::nullopt);
}

void StepReport::take_answers() {
  if (!sent_.work || !sent_.work->isCompleted()) return;
  const Sent ended = std::exchange(sent_, {});
  if (!ended.work->isSuccess()) return;  // the group has failed: the next bucket throws
  ended.work->wait();
  issued_before_ns_ = ended.issued_ns;
  ended_before_ns_ = ended.ended_ns->load();
  window_.emplace();
  for (const at::Tensor& bytes : ended.received) {
    const uint8_t* first = bytes.const_data_ptr<uint8_t>();
    window_->emplace_back(first, first + bytes.numel());
  }
}

void StepReport::exchange_if_due(bool joining) {
  if (!due_ || joining || !exchanges()) return;
  follow_members();
  if (!due_) return;
  due_ = false;
  const UnitScope unit;  // the step's
  take_answers();
  const Bytes mine = packed(times_.stats().steps);
  facts_.clear();
  rows_.clear();
  forget_gradients();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> sent{at::empty({static_cast<int64_t>(mine.size())}, at::kByte)};
  std::memcpy(sent[0].mutable_data_ptr(), mine.data(), mine.size());
  std::vector<std::vector<at::Tensor>> received(1);
  for (int rank = 0; rank < exchange_.group.ranks(); ++rank) received[0].push_back(at::empty_like(sent[0]));
  const NamedScope scope("step report");
  sent_.issued_ns = now_ns();
  sent_.ended_ns = std::make_shared<std::atomic<int64_t>>(0);
  sent_.work = exchange_.group.process_group()->allgather(received, sent);
  sent_.received = std::move(received[0]);
  sent_.work->getFuture()->addCallback([ended = sent_.ended_ns](c10::ivalue::Future&) { ended->store(now_ns()); });
}

StepReport::Bytes StepReport::packed(int64_t step) const {
  Bytes bytes;
  append(bytes, static_cast<int64_t>(rows_.size()));
  append(bytes, step);
  append(bytes, issued_before_ns_);
  append(bytes, ended_before_ns_);
  append(bytes, now_ns());
  for (std::size_t i = 0; i < every_; ++i) append(bytes, i < rows_.size() ? rows_[i] : StepRow{});
  bytes.insert(bytes.end(), facts_.begin(), facts_.end());
  bytes.resize(5 * sizeof(int64_t) + every_ * sizeof(StepRow) + kFactsBytes);
  std::memcpy(bytes.data() + bytes.size() - kAttachedBytes - sizeof gradients_, &gradients_, sizeof gradients_);
  return bytes;
}

}  // namespace ringdp
