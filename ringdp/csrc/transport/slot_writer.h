// SlotWriter: copies bytes into memory that another core reads next. Two ways: through this core's caches, or past
// them (base/stream_copy.h). Which is faster depends on where the two cores are: where they share a cache, the first
// (1.3 to 2 times), where they do not, the second (2 to 3 times); and the kernel moves ranks from core to core. So the
// writer times its larger copies. It affects timing only. Used by one thread at a time.
#pragma once

#include <cstddef>

namespace ringdp {

class SlotWriter {
 public:
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);
  bool streams() const { return streams_; }

 private:
  void judge(bool slow);

  bool streams_ = false;
  int slow_in_a_row_ = 0;
  int until_probe_ = 0;
};

}  // namespace ringdp
