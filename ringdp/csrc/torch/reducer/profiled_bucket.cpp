#include "torch/reducer/profiled_bucket.h"

#include <set>

#include "codec/codec.h"
#include "collective/algorithm_table.h"
#include "torch/backend/buffers.h"
#include "torch/backend/process_group.h"

namespace ringdp {
namespace {

constexpr std::size_t kMostPeers = 8;

std::string algorithm_of(const Bucket& bucket, const GroupHandle& group) {
  if (bucket.operation.hook != nullptr) return "hook";
  const auto* native = dynamic_cast<const CodecReduction*>(bucket.reduction);
  if (native != nullptr && native->enabled() && !bucket.too_small) return std::string("compressed");
  return std::string(
      algorithm_name(group.algorithm_of_all_reduce(dtype_of(bucket.buffer, "all_reduce"), bucket.buffer.nbytes())));
}

std::string peers_text(const std::string& algorithm, int rank, int ranks) {
  std::set<int> peers;
  if (algorithm == "ring") {
    peers = {(rank + ranks - 1) % ranks, (rank + 1) % ranks};
  } else {
    for (int other = 0; other < ranks; ++other)
      if (other != rank) peers.insert(other);
  }
  if (peers.size() > kMostPeers) return std::to_string(peers.size()) + " ranks";
  std::string text;
  for (const int peer : peers) text += (text.empty() ? "" : ", ") + std::to_string(peer);
  return (peers.size() == 1 ? "rank " : "ranks ") + text;
}

}  // namespace

std::string describe_for_profiler(const Bucket& bucket, const ReducerGroup& group) {
  const ProcessGroupRing* ring = group.ring(bucket.buffer.device().type());
  const std::string size = std::to_string(bucket.buffer.nbytes() >> 10) + " KiB";
  if (ring == nullptr) return bucket.name + " (" + size + ")";
  const std::string algorithm = algorithm_of(bucket, *ring->group());
  return bucket.name + " (" + algorithm + ", " + size + ", " + peers_text(algorithm, group.rank(), group.ranks()) + ")";
}

void profile_moving(const Bucket& bucket, const ReducerGroup& group) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  c10::intrusive_ptr<c10::ivalue::Future> future =
      bucket.operation.future ? bucket.operation.future
                              : (bucket.operation.work ? bucket.operation.work->getFuture() : nullptr);
  if (!future) return;
  auto range = std::make_shared<at::RecordFunction>(std::move(*callbacks));
  if (!range->isActive()) return;
  range->_setAsync();
  range->before("ringdp move " + describe_for_profiler(bucket, group));
  future->addCallback([range](c10::ivalue::Future&) { range->end(); });
}

}  // namespace ringdp
