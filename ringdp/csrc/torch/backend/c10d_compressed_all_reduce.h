// C10dCompressedAllReduce: one compressed all-reduce over any c10d backend, in three steps: every rank encodes the
// others' parts and sends them (all-to-all), decodes and adds the codes of its own part, encodes the mean and sends it
// to all (all-gather), and all ranks decode. Same arithmetic and order as collective/compressed_all_reduce.h with
// every rank as a host, so the same bits; parts are padded to the longest one, whose size all ranks know. On a device
// all work is queued on a stream of its own, without waiting on the host: over NCCL within the constructor, over ring
// each step in the callback of the one before. A backend that matches operations by the order of calls (gloo) needs
// the same order on all ranks: the Reducer waits until the last collective is issued (`wait_until_issued`), Python's
// hooks have a group and a thread for one bucket at a time. Owned by its Work and by those callbacks together; any
// thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "collective/compressed.h"
#include "collective/finite.h"
#include "torch/backend/work.h"
#include "torch/device/device_codec.h"

namespace ringdp {

class C10dCompressedAllReduce : public std::enable_shared_from_this<C10dCompressedAllReduce> {
 public:
  struct Section {
    float* x = nullptr;  // [count], in `buffer`
    std::size_t count = 0;
    uint32_t owner_offset = 0;
    cuda::Feedback feedback;
  };
  struct Call {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    at::Tensor buffer;  // float32
    std::vector<Section> sections;
    Compression compression;
    std::vector<at::Tensor> kept;          // the memory of the residuals
    at::Tensor non_finite;                 // int32 [1] on the buffer's device: becomes 1 where the mean is not finite
    std::shared_ptr<FiniteReport> report;  // of memory on the CPU; may be null
  };

  // Begins it, under the current name. Any error, also one in this call, is the Work's. Ranks with different sections
  // would misread each other's bytes; their operations' names differ, which is an error.
  static std::shared_ptr<C10dCompressedAllReduce> begin(Call call);

  const c10::intrusive_ptr<StagedWork>& work() const { return work_; }
  // Waits until this rank has issued the last collective: if the backend matches operations by the order of calls,
  // later ones on the same group must come after it. Returns at once over NCCL; ring does not need such an order.
  void wait_until_issued();

 private:
  explicit C10dCompressedAllReduce(Call call);
  using Step = void (C10dCompressedAllReduce::*)();

  void plan();
  void send_parts();
  void send_mean();
  void take_mean();
  void follow(c10d::Work& collective, Step next);
  void run(Step step);
  void end(std::exception_ptr error);
  std::byte* code_at(const at::Tensor& memory, int part) const;
  void look_for_own();

  struct Run {
    std::size_t section, begin, count;
    std::size_t code;  // where in its part's code it begins
  };

  Call call_;
  const std::string name_;
  const int rank_;
  const int ranks_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const DeviceCodec* const codec_;
  c10::Stream stream_;
  std::vector<std::vector<Run>> parts_;  // [rank]: the part of each section that the rank adds up
  std::size_t capacity_ = 0;             // bytes of a part
  at::Tensor sent_;                      // [ranks · capacity] bytes: codes of all parts; later the means'
  at::Tensor received_;                  // [ranks · capacity]: all ranks' codes of this rank's part
  at::Tensor mean_;                      // [capacity]: the code of this rank's part of the mean
  std::vector<c10::intrusive_ptr<c10d::Work>> collectives_;
  c10::intrusive_ptr<StagedWork> work_;
  std::mutex issued_mutex_;
  std::condition_variable issued_changed_;
  bool issued_ = false;
};

}  // namespace ringdp
