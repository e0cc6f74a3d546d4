#include "collective/finite.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace ringdp {

FiniteWatch::FiniteWatch(DType dtype, std::shared_ptr<FiniteReport> report)
    : element_bytes_(dtype_size(dtype)), find_(first_non_finite(dtype)) {
  if (find_ != nullptr) report_ = std::move(report);
}

void FiniteWatch::look_at_own(std::span<const std::byte> input) {
  const std::byte* known = report_->own;
  if (known != nullptr && std::less<>()(known, input.data())) return;
  const std::size_t count = input.size() / element_bytes_;
  if (const std::size_t at = find_(input.data(), count); at < count) report_->own = input.data() + at * element_bytes_;
}

void FiniteWatch::look_at_result(std::span<const std::byte> block, std::size_t from, std::size_t upto) {
  if (!report_->finite) return;
  from -= from % element_bytes_;
  const std::size_t count = (upto - from) / element_bytes_;
  report_->finite = find_(block.data() + from, count) == count;
}

}  // namespace ringdp
