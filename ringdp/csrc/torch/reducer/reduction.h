// Reduction: how the gradients of some parameters are reduced other than by an exact all-reduce. Owned by Python
// (reduction_bindings.cpp) and the reducers that use it. Any thread; methods that call into Python take the GIL
// themselves.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "codec/codec.h"

namespace ringdp {

class Reduction {
 public:
  explicit Reduction(std::string name) : name_(std::move(name)) {}
  virtual ~Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  const std::string& name() const { return name_; }
  // Disabled: the same buckets are reduced exactly. Set between steps, on all ranks alike.
  bool enabled() const { return enabled_; }
  void set_enabled(bool enabled) { enabled_ = enabled; }

 private:
  const std::string name_;
  std::atomic<bool> enabled_{true};
};

// One of the core's codecs. See collective/compressed.h.
class CodecReduction final : public Reduction {
 public:
  CodecReduction(CodecId codec, bool feedback)
      : Reduction(std::string(ringdp::codec(codec).name)), codec_(codec), feedback_(feedback) {}

  CodecId codec() const { return codec_; }
  bool feedback() const { return feedback_; }

 private:
  const CodecId codec_;
  const bool feedback_;
};

// Reduces exactly, except buckets to which Reducer::choose gave another of the plan's reductions. With `feedback` some
// of those keep residuals, which are added to the gradients of the next exact step.
class AutoReduction final : public Reduction {
 public:
  explicit AutoReduction(bool feedback) : Reduction("chosen by bucket"), feedback_(feedback) {}

  bool feedback() const { return feedback_; }

 private:
  const bool feedback_;
};

inline bool is_auto(const Reduction* reduction) { return dynamic_cast<const AutoReduction*>(reduction) != nullptr; }

// A communication hook for these parameters' buckets only.
class HookReduction : public Reduction {
 public:
  using Reduction::Reduction;

  virtual c10d::CommHookInterface& hook() = 0;
  // Whether all results of this backward were finite, the same on all ranks; nullopt if the reduction does not check.
  virtual std::optional<bool> finite() = 0;
  // A backward has ended. The reduction's new states count only if all results were finite, and not for parameters
  // that no rank used.
  virtual void commit(bool finite, const std::vector<std::string>& unused) = 0;
  // The number of ranks with input (torch's Join); 0: all of them.
  virtual void set_divisor(int64_t divisor) = 0;
};

}  // namespace ringdp
