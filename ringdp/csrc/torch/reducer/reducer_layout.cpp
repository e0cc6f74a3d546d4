// Which gradient lies where: the parameters that require grad, their buckets, and the buckets' memory.
#include <algorithm>
#include <numeric>
#include <utility>

#include "torch/reducer.h"

namespace ringdp {
namespace {

// From here on a copy costs more than an operation of its own.
constexpr std::size_t kDirectBytes = std::size_t{4} << 20;

constexpr uint64_t kIdleGroup = uint64_t{1} << 63;

}  // namespace

// Sparse, integer and complex gradients are always exact.
Method* Reducer::method_of(std::size_t watched) const {
  if (methods_.methods.empty()) return nullptr;
  const int index = methods_.method_of[watched];
  const bool plain = !watch_[watched].sparse && watch_[watched].tensor.is_floating_point();
  return index < 0 || !plain ? nullptr : methods_.methods[static_cast<std::size_t>(index)].get();
}

LayoutItem Reducer::layout_item(std::size_t watched) const {
  const WatchedParameter& parameter = watch_[watched];
  const c10::Device device = parameter.tensor.device();
  const c10::ScalarType dtype = bucket_dtype(watched);
  const uint64_t method = method_of(watched) == nullptr ? 0 : static_cast<uint64_t>(methods_.method_of[watched]) + 1;
  LayoutItem item;
  item.group = (method << 40) | (static_cast<uint64_t>(device.type()) << 32) |
               (static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16) | static_cast<uint64_t>(dtype);
  item.numel = static_cast<std::size_t>(parameter.tensor.numel());
  item.element_bytes = c10::elementSize(dtype);
  const bool in_place = dtype == parameter.tensor.scalar_type();
  item.alone = parameter.sparse || (in_place && item.numel * item.element_bytes >= kDirectBytes);
  return item;
}

c10::ScalarType Reducer::bucket_dtype(std::size_t watched) const {
  const WatchedParameter& parameter = watch_[watched];
  const c10::ScalarType own = parameter.tensor.scalar_type();
  if (parameter.sparse || !parameter.tensor.is_floating_point()) return own;
  return method_of(watched) != nullptr ? at::kFloat : options_.reduce_dtype.value_or(own);
}

void Reducer::take_trainable() {
  std::vector<bool> local(watch_.size(), false);
  for (const Slot& slot : slots_) local[slot.watched] = slot.local;
  parameters_.clear();
  names_.clear();
  slots_.clear();
  items_.clear();
  idle_.clear();
  for (std::size_t i = 0; i < watch_.size(); ++i) {
    if (!watch_.trains(i)) continue;
    parameters_.push_back(watch_[i].tensor);
    names_.push_back(watch_[i].name);
    Slot slot;
    slot.parameter = watch_[i].tensor;
    slot.watched = i;
    slot.sparse = watch_[i].sparse;
    slot.local = local[i];
    slots_.push_back(std::move(slot));
  }
  describe_items();
}

// What the layout must know of each, which depends on its method.
void Reducer::describe_items() {
  items_.clear();
  for (Slot& slot : slots_) {
    items_.push_back(layout_item(slot.watched));
    slot.method = method_of(slot.watched);
    slot.dtype = slot.parameter.scalar_type();
    slot.cast = bucket_dtype(slot.watched) != slot.dtype;
  }
  set_idle(idle_);
}

// The reverse of registration, until the order in which gradients arrive is known.
void Reducer::plan_in_reverse() {
  std::vector<std::size_t> order(slots_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  plan(order);
}

void Reducer::plan(std::span<const std::size_t> order) {
  order_.assign(order.begin(), order.end());
  layout_ = assign_buckets(items_, order, options_.caps_bytes);
  chosen_.clear();
  const auto busy = [&](const auto& members) { return idle_.empty() || !idle_[members.front()]; };
  const auto end = std::stable_partition(layout_.begin(), layout_.end(), busy);
  kept_ = static_cast<std::size_t>(end - layout_.begin());
  // Which parameters were used travels behind the gradients of the last bucket, so that is an exact one with memory of
  // its own.
  const auto shared = [&](const auto& members) {
    return !items_[members.front()].alone && slots_[members.front()].method == nullptr;
  };
  const auto last = std::find_if(std::make_reverse_iterator(end), layout_.rend(), shared);
  if (last != layout_.rend()) std::rotate(last.base() - 1, last.base(), end);
  count_traffic();
}

void Reducer::count_traffic() {
  stats_.buckets = stats_.bytes = 0;
  for (std::size_t index = 0; index < kept_; ++index) count_bucket(index);
}

void Reducer::count_bucket(std::size_t index) {
  ++stats_.buckets;
  for (std::size_t member : layout_[index]) {
    if (!slots_[member].sparse)
      stats_.bytes += static_cast<int64_t>(items_[member].numel * items_[member].element_bytes);
  }
}

// In the order that is known, where methods changed.
void Reducer::lay_out_again() {
  describe_items();
  const std::vector<std::size_t> order = order_;
  plan(order);
  drop_memory();
}

// At the first forward that needs it, not at construction: a hook may still be registered, and evaluation needs none.
void Reducer::allocate() {
  if (!buckets_.empty() || local()) return;
  std::vector<Bucket> buckets(layout_.size());
  for (std::size_t index = 0; index < buckets.size(); ++index) {
    Bucket& bucket = buckets[index];
    bucket.index = index;
    bucket.members = layout_[index];
    bucket.plan = plan_bucket(items_, bucket.members);
    bucket.name = describe_bucket(index, bucket.members, names_);
    bucket.pending = bucket.members.size();
    bucket.method = bucket_method(index);
    bucket.dtype = bucket_dtype(slots_[bucket.members.front()].watched);
    bucket.sparse = slots_[bucket.members.front()].sparse;
    bucket.direct = !bucket.sparse && !carries_marks(index) && items_[bucket.members.front()].alone;
    for (std::size_t member : bucket.members) {
      slots_[member].bucket = index;
      slots_[member].direct = bucket.direct;
    }
  }
  buckets_ = std::move(buckets);
  for (std::size_t index = 0; index < kept_; ++index) give_memory(buckets_[index]);
}

bool Reducer::carries_marks(std::size_t bucket) const {
  return bucket + 1 == kept_ && options_.unused != UnusedParameters::kForbidden && !exchange_.has_hook() &&
         !compressed(bucket) && !options_.host_control;
}

// A bucket of idle parameters gets its memory when one of them has a gradient after all.
void Reducer::give_memory(Bucket& bucket) {
  if (bucket.sparse || bucket.direct || bucket.buffer.defined()) return;
  const std::size_t marks = carries_marks(bucket.index) ? parameters_.size() + 1 : 0;
  allocate_bucket(bucket, parameters_[bucket.members.front()].device(), marks);
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    Slot& slot = slots_[bucket.members[position]];
    slot.view = gradient_view(bucket, position, slot.parameter);
  }
}

void Reducer::drop_memory() {
  buckets_.clear();
  for (Slot& slot : slots_) slot.view.reset();
}

// From the next layout on they share no bucket with the others.
void Reducer::set_idle(std::vector<bool> idle) {
  const auto busy = std::count(idle.begin(), idle.end(), false);
  idle_ = busy == 0 ? std::vector<bool>() : std::move(idle);
  for (std::size_t i = 0; i < idle_.size(); ++i) {
    items_[i].group = idle_[i] ? items_[i].group | kIdleGroup : items_[i].group & ~kIdleGroup;
  }
}

}  // namespace ringdp
