// StagedWork: the Work of a call that takes several operations, the later of which depend on the results of the
// earlier ones. Owned by its caller and by the callbacks between its stages, which run on the completion threads. Any
// thread.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "engine/group.h"
#include "torch/backend/hooks.h"

namespace ringdp {

class StagedWork final : public c10d::Work {
 public:
  // `engine` may be null. The future is for the streams that are current when the work ends.
  StagedWork(std::shared_ptr<Engine> engine, int rank, c10d::OpType type, const char* title,
             std::vector<at::Tensor> outputs, std::shared_ptr<Hooks> hooks = nullptr);

  // Runs `stage`; an exception ends the work.
  void attempt(const std::function<void()>& stage);
  void end(std::exception_ptr error);

  // Polls Python's signals while it waits, like Engine::wait; throws the work's error.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<Engine> engine_;  // shared with the Runtime; may be null
  std::shared_ptr<Hooks> hooks_;    // of the process group, called after its success; may be null
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // of the streams that are current where `end` is called
};

}  // namespace ringdp
