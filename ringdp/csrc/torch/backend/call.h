// One call of torch's collective API: its operations (Call), and the checks of its arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "engine/group.h"
#include "torch/backend/buffers.h"
#include "torch/backend/work.h"

namespace ringdp {

// CallTiming: of a message or, from the options of any of torch's collectives, of that one. Value type.
struct CallTiming {
  bool async_op = true;
  std::chrono::milliseconds timeout = kNoTimeout;  // kNoTimeout or negative: the group's

  CallTiming() = default;
  template <typename Options>
  CallTiming(const Options& options) : async_op(options.asyncOp), timeout(options.timeout) {}
};

// Call: made by ProcessGroupRing::begin_call. It collects the engine's operations of the call for its Work, and waits
// if the call is synchronous. A local variable of the calling thread, without the GIL.
class Call {
 public:
  Call(std::shared_ptr<GroupHandle> group, DeviceSide& devices, c10::intrusive_ptr<RingWork> work,
       const CallTiming& timing);

  GroupHandle* operator->() const { return group_.get(); }  // issues its operations, with `options`
  // Options for the next operation; with `last` it is the call's last one.
  CallOptions options(std::shared_ptr<Buffers> buffers, bool last = true);
  // As in gloo: with several lists of outputs the future's value is the list of them.
  void set_output_lists(const std::vector<std::vector<at::Tensor>>& lists) { work_->set_output_lists(lists); }
  void add(std::shared_ptr<Work> operation) { operations_.push_back(std::move(operation)); }
  c10::intrusive_ptr<c10d::Work> done();
  c10::intrusive_ptr<c10d::Work> done(std::shared_ptr<Work> only) {
    add(std::move(only));
    return done();
  }

 private:
  const std::shared_ptr<GroupHandle> group_;  // shared with the process group, whose members may change
  DeviceSide& devices_;
  const bool synchronous_;
  const int64_t timeout_ms_;
  const int32_t call_site_;
  c10::intrusive_ptr<RingWork> work_;
  std::vector<std::shared_ptr<Work>> operations_;
  std::vector<DeviceUse> uses_;  // of memory on devices, by these operations
};

// Checks of the arguments of torch's collectives, with the messages of torch's own backends, which users' tests may
// match. They throw Error(kValue) that begins with "ProcessGroupRing::<what>: ". Any thread.

[[noreturn]] void refuse(const char* what, const std::string& why);

void require_reduction(const char* what, DType dtype, ReduceOp op);
void require_not_empty(const char* what, const std::vector<at::Tensor>& tensors);
void require_one(const char* what, const std::vector<at::Tensor>& tensors, const char* kind = "");  // kind: "input "
void require_root(const char* what, int64_t root, int world);
// The tensor at `index` of a list has the type and as many elements as `model`.
void require_like(const char* what, const at::Tensor& tensor, const at::Tensor& model, std::size_t index);
void require_all_like(const char* what, const std::vector<at::Tensor>& tensors, const at::Tensor& model);
// `whole` holds `parts` pieces of the size of `piece`.
void require_parts(const char* what, const at::Tensor& whole, const at::Tensor& piece, int parts,
                   const char* whole_name, const char* piece_name);
// The root of a gather or scatter passes one list with a tensor per rank, the other ranks none. `kind`: "output" or
// "input".
void require_root_list(const char* what, const std::vector<std::vector<at::Tensor>>& lists, bool root, int world,
                       const char* kind);

std::vector<std::span<std::byte>> cut(std::span<std::byte> whole, int parts);
// Cut along the first dimension into pieces of `rows[i]`, or equally if `rows` is empty.
std::vector<std::span<std::byte>> cut_rows(const char* what, const at::Tensor& tensor, std::span<std::byte> memory,
                                           const std::vector<int64_t>& rows, int parts);

}  // namespace ringdp
