#include "torch/reducer/bucket_filler.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include "torch/reducer/messages.h"

namespace ringdp {

void BucketFiller::begin() {
  for (const std::size_t i : never_to_come()) {
    write(i);
    mark_ready(i);
  }
}

std::vector<std::size_t> BucketFiller::never_to_come() const {
  if (arrivals_.knows_graph()) return arrivals_.unexpected();
  const bool shown = layout_.options.unused == UnusedParameters::kExpected && layout_.options.graph_shows_unused;
  return shown && !arrivals_.static_graph() ? layout_.hooks.not_in_graph() : std::vector<std::size_t>();
}

void BucketFiller::arrived(std::size_t parameter) {
  const ModuleParameter& described = layout_.parameters[parameter];
  switch (arrivals_.arrived(parameter)) {
    case ArrivalTracker::Arrival::kOneOfSeveral:
      return;
    case ArrivalTracker::Arrival::kUnexpected:
      TORCH_CHECK(false, unexpected_text(described.name));
    case ArrivalTracker::Arrival::kTwice:
      TORCH_CHECK(false, marked_twice_text(parameter, described.name, described.used_in));
    case ArrivalTracker::Arrival::kComplete:
      write(parameter);
      mark_ready(parameter);
  }
}

// Its part of the bucket becomes this rank's gradient, or zeros if it has none. `late`: the bucket was not sent during
// backward.
void BucketFiller::write(std::size_t parameter, bool late) {
  const bool used = layout_.parameters.tensors()[parameter].grad().defined();
  arrivals_.note_used(parameter, used);
  layout_.left_over.averaged(parameter);
  // with one rank .grad stays, except for the factor of micro-batches
  if (layout_.local()) return layout_.store.multiply(parameter);
  if (!used && layout_.plan.bucket_of(parameter) >= arrivals_.sending() && !late) return;  // the bucket may not be sent
  const std::size_t bucket = layout_.plan.bucket_of(parameter);
  failure_.keeping_in(static_cast<int64_t>(bucket), layout_.store[bucket].name,
                      [&] { layout_.store.write(parameter); });
}

void BucketFiller::mark_ready(std::size_t parameter) {
  if (!arrivals_.mark_ready(parameter) || layout_.local()) return;
  while (const auto next = arrivals_.next_full()) launch(layout_.store[*next]);
}

void BucketFiller::launch(Bucket& bucket) {
  const UnitScope unit;
  failure_.keeping_in(static_cast<int64_t>(bucket.index), bucket.name, [&] {
    if (bucket.marks.defined()) used_.write(bucket.marks);
    if (arrivals_.sent() == 0) times_.note_first_launch();
    arrivals_.note_sent(bucket.index);  // also if it fails: the others have received this rank's part, or its failure
    report_.add_gradients(bucket);
    if (!layout_.repair.on() || layout_.repair.keep(bucket)) send(bucket, backward_.forwards().note());
  });
}

// `note`: see Forwards. It is in the name of the first bucket and of the map, since a hook may reduce buckets
// elsewhere.
void BucketFiller::send(Bucket& bucket, const std::string& note) {
  layout_.buckets.launch(bucket, backward_.step(), arrivals_.sending(), bucket.index == 0 ? note : std::string());
  // A hook's callbacks may issue further operations, at a different time on every rank.
  const bool last = bucket.index + 1 == arrivals_.sending();
  if (last && !layout_.calls_back() && layout_.sends_used_map()) used_.launch(/*with_input=*/true, note);
}

void BucketFiller::send_again() {
  used_.drop_operations();
  layout_.repair.restore();
  failure_.keeping_in(-1, "weights", [&] { layout_.weights.exchange_again(backward_.step()); });
  for (std::size_t index = 0; index < arrivals_.sending(); ++index) {
    Bucket& bucket = layout_.store[index];
    bucket.factors = layout_.weights.factors().of_ranks;
    failure_.keeping_in(static_cast<int64_t>(index), bucket.name, [&] { send(bucket); });
  }
}

std::vector<std::size_t> BucketFiller::finish() {
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (!arrivals_.ready(i)) write(i);
    if (!arrivals_.used(i)) missing.push_back(i);
  }
  arrivals_.graph_learned();
  for (std::size_t i = 0; i < arrivals_.size(); ++i) {
    if (!arrivals_.ready(i)) mark_ready(i);
  }
  return missing;
}

void BucketFiller::send_late(Bucket& bucket) {
  for (std::size_t member : bucket.members) {
    if (!arrivals_.used(member)) write(member, /*late=*/true);
  }
  launch(bucket);
}

}  // namespace ringdp
