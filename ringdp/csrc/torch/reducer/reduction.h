// Method: how the gradients of some parameters are reduced where that is not by an exact all-reduce.
// Made by Python (method_bindings.cpp), which shares it with the reducers that use it. Any thread; what calls into Python
// takes the GIL itself.
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

class Method {
 public:
  explicit Method(std::string name) : name_(std::move(name)) {}
  virtual ~Method() = default;
  Method(const Method&) = delete;
  Method& operator=(const Method&) = delete;

  const std::string& name() const { return name_; }
  // Off: the same buckets are reduced exactly. Set between steps, on all ranks alike.
  bool enabled() const { return enabled_; }
  void set_enabled(bool enabled) { enabled_ = enabled; }

 private:
  const std::string name_;
  std::atomic<bool> enabled_{true};
};

// One of the core's codecs. See collective/compressed.h.
class NativeMethod final : public Method {
 public:
  NativeMethod(CodecId codec, bool feedback)
      : Method(std::string(ringdp::codec(codec).name)), codec_(codec), feedback_(feedback) {}

  CodecId codec() const { return codec_; }
  bool feedback() const { return feedback_; }

 private:
  const CodecId codec_;
  const bool feedback_;
};

// Exactly, but where Reducer::choose gave a bucket another of the plan's methods. With `feedback` some of those keep
// residuals: what they still owe is added to the gradients of the next step that is exact.
class ChosenMethod final : public Method {
 public:
  explicit ChosenMethod(bool feedback) : Method("chosen by bucket"), feedback_(feedback) {}

  bool feedback() const { return feedback_; }

 private:
  const bool feedback_;
};

// A communication hook for these parameters' buckets only.
class HookMethod : public Method {
 public:
  using Method::Method;

  virtual c10d::CommHookInterface& hook() = 0;
  // Whether everything this backward has reduced was finite, the same on all ranks; nothing where the method does not say.
  virtual std::optional<bool> finite() = 0;
  // A backward has ended. What the method remembers of it counts only where all of it was finite, and not for the
  // parameters that no rank used.
  virtual void commit(bool finite, const std::vector<std::string>& unused) = 0;
  // How many ranks have input, where some have run out of it (torch's Join); 0: all of them.
  virtual void set_divisor(int64_t divisor) = 0;
};

}  // namespace ringdp
