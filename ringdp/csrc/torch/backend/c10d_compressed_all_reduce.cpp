#include "torch/backend/c10d_compressed_all_reduce.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "collective/compressed_plan.h"
#include "engine/completion.h"
#include "kernels/kernels.h"
#include "torch/backend/process_group.h"

namespace ringdp {
namespace {

constexpr std::size_t kAlignmentBytes = 16;  // of a run's code: kernels load and store whole words

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes; }

// Of the ring in the group, so that a wait checks Python's signals; null without a ring.
std::shared_ptr<Engine> engine_of(c10d::ProcessGroup& group) {
  for (const c10::Device& type : group.getDeviceTypes())
    if (ProcessGroupRing* ring = ring_of(group, type.type())) return ring->group()->engine();
  return nullptr;
}

// Two streams of each device in turn: one computes while the other waits for the network. No more, because torch's
// allocator keeps separate blocks for each stream.
c10::Stream stream_for(const at::Tensor& buffer) {
  const c10::Device device = buffer.device();
  if (device.is_cpu()) return c10::Stream(c10::Stream::DEFAULT, device);
  static std::mutex mutex;
  static auto& streams = *new std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::vector<c10::Stream>>();
  const std::lock_guard lock(mutex);
  std::vector<c10::Stream>& mine = streams[{device.type(), device.index()}];
  const c10::impl::VirtualGuardImpl guard(device.type());
  while (mine.size() < 2) mine.push_back(guard.getStreamFromGlobalPool(device));
  std::swap(mine[0], mine[1]);
  return mine[0];
}

// While it exists, this operation's stream is the current one, ordered after the work queued on the one before.
class OnStream {
 public:
  OnStream(const c10::Stream& stream, const c10::Device& device) {
    if (device.is_cpu()) return;
    const c10::Stream before = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (before != stream) {
      c10::Event reached(device.type());
      reached.record(before);
      stream.wait(reached);
    }
    guard_.emplace(stream);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

cuda::Feedback from(cuda::Feedback feedback, std::size_t begin) {
  for (float*& memory : feedback.both)
    if (memory != nullptr) memory += begin;
  return feedback;
}

}  // namespace

std::shared_ptr<C10dCompressedAllReduce> C10dCompressedAllReduce::begin(Call call) {
  std::shared_ptr<C10dCompressedAllReduce> it(new C10dCompressedAllReduce(std::move(call)));
  const CallbackGate gate;  // until `follow` has attached the next step
  it->run(&C10dCompressedAllReduce::send_parts);
  return it;
}

C10dCompressedAllReduce::C10dCompressedAllReduce(Call call)
    : call_(std::move(call)),
      name_(current_name()),
      rank_(call_.group->getRank()),
      ranks_(call_.group->getSize()),
      backend_(call_.group->getBackend(call_.buffer.device().type())),
      codec_(device_codec(call_.buffer.device().type())),
      stream_(stream_for(call_.buffer)),
      work_(c10::make_intrusive<StagedWork>(engine_of(*call_.group), rank_, c10d::OpType::ALLREDUCE,
                                            "ring:all_reduce_compressed", std::vector<at::Tensor>{call_.buffer})) {}

void C10dCompressedAllReduce::plan() {
  const Codec& codec = ringdp::codec(call_.compression.codec);
  parts_.resize(static_cast<std::size_t>(ranks_));
  std::vector<std::size_t> bytes(parts_.size(), 0);
  for (std::size_t i = 0; i < call_.sections.size(); ++i) {
    const Section& section = call_.sections[i];
    const std::vector<std::size_t> bounds = part_bounds(section.count, ranks_, section.owner_offset);
    for (std::size_t part = 0; part < parts_.size(); ++part) {
      const std::size_t count = bounds[part + 1] - bounds[part];
      if (count == 0) continue;
      parts_[part].push_back({i, bounds[part], count, bytes[part]});
      bytes[part] += aligned(codec.encoded_bytes(count));
    }
  }
  capacity_ = *std::max_element(bytes.begin(), bytes.end());
}

// Runs a step under this operation's name and stream, hidden from autograd.
void C10dCompressedAllReduce::run(Step step) {
  try {
    const NamedScope name(name_);
    const OnStream on_stream(stream_, call_.buffer.device());
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    (this->*step)();
  } catch (...) {
    end(std::current_exception());
  }
}

// `collective` may be complete already, and its callback run at once.
void C10dCompressedAllReduce::follow(c10d::Work& collective, Step next) {
  collective.getFuture()->addCallback([self = shared_from_this(), next](c10::ivalue::Future& done) {
    if (done.hasError())
      self->end(done.exception_ptr());
    else
      self->run(next);
  });
}

std::byte* C10dCompressedAllReduce::code_at(const at::Tensor& memory, int part) const {
  return static_cast<std::byte*>(memory.mutable_data_ptr()) + static_cast<std::size_t>(part) * capacity_;
}

void C10dCompressedAllReduce::send_parts() {
  if (codec_ == nullptr)
    throw Error(ErrorKind::kState, "this build has no kernels for codes on " + call_.buffer.device().str() +
                                       ": build ringdp with a CUDA torch and its nvcc, or compress nothing");
  plan();
  if (capacity_ == 0) return end(nullptr);
  if (!call_.buffer.is_cpu()) {
    // The owner of this memory may release it before this stream is done.
    const c10::impl::VirtualGuardImpl device(call_.buffer.device().type());
    device.recordDataPtrOnStream(call_.buffer.storage().data_ptr(), stream_);
    for (const at::Tensor& tensor : call_.kept) device.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
  }
  const auto options = at::TensorOptions().dtype(at::kByte).device(call_.buffer.device());
  sent_ = at::empty({ranks_ * static_cast<int64_t>(capacity_)}, options);
  received_ = at::empty_like(sent_);
  mean_ = at::empty({static_cast<int64_t>(capacity_)}, options);
  std::vector<cuda::EncodeRun> runs;
  for (int part = 0; part < ranks_; ++part) {
    if (part == rank_) continue;
    for (const Run& run : parts_[static_cast<std::size_t>(part)]) {
      const Section& section = call_.sections[run.section];
      cuda::EncodeRun& one = runs.emplace_back();
      one.x = section.x + run.begin;
      one.code = code_at(sent_, part) + run.code;
      one.count = run.count;
      one.feedback = from(section.feedback, run.begin);
    }
  }
  // A non-finite value of this rank is in the mean on all ranks; checked here, only this rank would see it.
  codec_->encode(call_.compression.codec, runs, call_.compression.loss_scale, nullptr, stream_);
  std::vector<int64_t> equal;
  collectives_.push_back(backend_->alltoall_base(received_, sent_, equal, equal));
  follow(*collectives_.back(), &C10dCompressedAllReduce::send_mean);
}

void C10dCompressedAllReduce::send_mean() {
  std::vector<cuda::ReduceRun> runs;
  for (const Run& run : parts_[static_cast<std::size_t>(rank_)]) {
    const Section& section = call_.sections[run.section];
    cuda::ReduceRun& one = runs.emplace_back();
    one.x = section.x + run.begin;
    one.codes = code_at(received_, 0) + run.code;
    one.stride = capacity_;
    one.code = code_at(mean_, 0) + run.code;
    one.count = run.count;
    one.feedback = from(section.feedback, run.begin);
  }
  codec_->reduce_codes(call_.compression.codec, runs, ranks_, rank_, static_cast<float>(call_.compression.divisor),
                       call_.compression.loss_scale, nullptr, stream_);
  collectives_.push_back(backend_->_allgather_base(sent_, mean_));
  follow(*collectives_.back(), &C10dCompressedAllReduce::take_mean);
  const std::lock_guard lock(issued_mutex_);
  issued_ = true;
  issued_changed_.notify_all();
}

void C10dCompressedAllReduce::take_mean() {
  auto* flag = call_.non_finite.defined() ? call_.non_finite.mutable_data_ptr<int32_t>() : nullptr;
  int32_t seen = 0;
  const bool on_host = call_.buffer.is_cpu();
  if (on_host) look_for_own();
  std::vector<cuda::DecodeRun> runs;
  for (int part = 0; part < ranks_; ++part)
    for (const Run& run : parts_[static_cast<std::size_t>(part)])
      runs.push_back({call_.sections[run.section].x + run.begin, code_at(sent_, part) + run.code, run.count});
  codec_->decode_set(call_.compression.codec, runs, on_host ? &seen : flag, stream_);
  if (on_host && seen != 0) {
    if (flag != nullptr) *flag = 1;
    if (call_.report) call_.report->finite = false;
  }
  end(nullptr);
}

// Searches this rank's input, which is still intact, only if the mean is not finite.
void C10dCompressedAllReduce::look_for_own() {
  if (!call_.report) return;
  const Codec& codec = ringdp::codec(call_.compression.codec);
  bool finite = true;
  for (int part = 0; part < ranks_; ++part)
    for (const Run& run : parts_[static_cast<std::size_t>(part)])
      finite &= codec.inspect(code_at(sent_, part) + run.code, run.count) == Encoded::kFinite;
  if (finite) return;
  for (const Section& section : call_.sections) {
    const std::size_t at = first_non_finite(DType::kFloat32)(section.x, section.count);
    const auto* found = reinterpret_cast<const std::byte*>(section.x + at);
    const bool first = call_.report->own == nullptr || std::less<>()(found, call_.report->own);
    if (at < section.count && first) call_.report->own = found;
  }
}

void C10dCompressedAllReduce::end(std::exception_ptr error) {
  {
    const std::lock_guard lock(issued_mutex_);
    issued_ = true;
    issued_changed_.notify_all();
  }
  std::optional<OnStream> on_stream;  // for the Work's future
  try {
    if (!error) on_stream.emplace(stream_, call_.buffer.device());
  } catch (...) {
    error = std::current_exception();  // of the device
  }
  // Released before the end is reported: a thread of the backend must not drop the last reference to it.
  collectives_.clear();
  backend_.reset();
  call_.group.reset();
  sent_.reset();
  received_.reset();
  mean_.reset();
  work_->end(std::move(error));
}

void C10dCompressedAllReduce::wait_until_issued() {
  std::unique_lock lock(issued_mutex_);
  issued_changed_.wait(lock, [this] { return issued_; });
}

}  // namespace ringdp
