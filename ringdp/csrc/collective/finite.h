// FiniteReport: the infinities and NaNs that an all-reduce found, which looks for them while the bytes are in a cache.
// Made by the caller, written by the thread that drives the engine, read by any thread once the Work is done.
// FiniteWatch: an algorithm passes its elements through it. Owned by the operation, used by the driving thread; it does
// nothing without a report and without a device for the results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "device/staging.h"
#include "kernels/kernels.h"

namespace ringdp {

struct FiniteReport {
  bool finite = true;              // all elements of the result; the same on all ranks
  const std::byte* own = nullptr;  // the first element of this rank's input that was not finite, as far as it was found
  int64_t coding_ns = 0;           // of a compressed all-reduce: spent on encoding and decoding
};

class FiniteWatch {
 public:
  FiniteWatch() = default;
  // `report` may be null, and stays as it is for types that have no infinities. It is shared with the caller.
  FiniteWatch(DType dtype, std::shared_ptr<FiniteReport> report);

  bool on() const { return report_ != nullptr; }

  // Elements of this rank's input, before they are overwritten; each is shown once, in any order.
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
  void hand_on(Staging* staging) { staging_ = staging; }  // results, to a device; null: they stay here

 private:
  void look_at_own(std::span<const std::byte> input);
  void look_at_result(std::span<const std::byte> block, std::size_t from, std::size_t upto);

  std::size_t element_bytes_ = 1;
  FirstNonFinite find_ = nullptr;
  Staging* staging_ = nullptr;  // the operation's
  std::shared_ptr<FiniteReport> report_;
};

}  // namespace ringdp
