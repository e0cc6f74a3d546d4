// FiniteReport: the infinities and NaNs that an all-reduce found in its bytes, while they were in a cache. Made by the
// caller, written by the thread that drives the engine, read by any thread once the Work is done. FiniteWatch: an
// algorithm reports its elements to it. Owned by the operation, used by the driving thread; without a report and a
// device for the results it does nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device/staging.h"
#include "kernels/kernels.h"

namespace ringdp {

struct FiniteReport {
  bool finite = true;  // all elements of the result; the same on all ranks
  // the first element of this rank's input that was found not to be finite; null: none was found
  const std::byte* own = nullptr;
  int64_t coding_ns = 0;  // of a compressed all-reduce: spent on encoding and decoding
};

class FiniteWatch {
 public:
  FiniteWatch() = default;
  // `report` may be null, and is not changed for types without infinities. It is shared with the caller.
  FiniteWatch(DType dtype, std::shared_ptr<FiniteReport> report);

  bool on() const { return report_ != nullptr; }

  // Elements of this rank's input, before they are overwritten; each once, in any order.
  void own(std::span<const std::byte> input) {
    if (on()) look_at_own(input);
  }
  // Bytes [from, upto) of `block` now hold the result. The parts of a block come in order, and may end within an
  // element.
  void result(std::span<const std::byte> block, std::size_t from, std::size_t upto) {
    if (on()) look_at_result(block, from, upto);
    if (staging_ != nullptr) staging_->final(block.subspan(from, upto - from));
  }
  void result(std::span<const std::byte> block) { result(block, 0, block.size()); }
  void hand_on(Staging* staging) { staging_ = staging; }  // copies results to a device; null: there is none

 private:
  void look_at_own(std::span<const std::byte> input);
  void look_at_result(std::span<const std::byte> block, std::size_t from, std::size_t upto);

  std::size_t element_bytes_ = 1;
  FirstNonFinite find_ = nullptr;
  Staging* staging_ = nullptr;  // the operation's
  std::shared_ptr<FiniteReport> report_;
};

}  // namespace ringdp
