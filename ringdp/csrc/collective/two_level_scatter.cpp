#include "collective/two_level_scatter.h"

#include "collective/chunks.h"

namespace ringdp {

ReduceScatterPlan::ReduceScatterPlan(const HostMap& hosts, const std::vector<std::span<std::byte>>& chunks,
                                     std::span<std::byte> out, DType dtype, ReduceOp op)
    : hosts_(hosts),
      half_(dtype == DType::kFloat16 || dtype == DType::kBfloat16),
      ranks_(op == ReduceOp::kAvg ? hosts.ranks : 1) {
  int count = static_cast<int>((out.size() + RankOrderFold::kBlockBytes - 1) / RankOrderFold::kBlockBytes);
  Chunks blocks(out.size(), count, dtype_size(dtype));
  for (int number = 0; number < count; ++number) {
    std::size_t begin = blocks.begin(number), size = blocks.size(number);
    if (size == 0) continue;
    for (int home = 0; home < hosts_.count(); ++home) {
      const std::vector<int>& members = hosts_.members[static_cast<std::size_t>(home)];
      for (int place = 0; place < static_cast<int>(members.size()); ++place) {
        auto member = static_cast<std::size_t>(members[static_cast<std::size_t>(place)]);
        make_block(home, place, chunks[member].subspan(begin, size), out.subspan(begin, size));
      }
    }
  }
}

void ReduceScatterPlan::make_block(int home, int place, std::span<std::byte> input, std::span<std::byte> out) {
  const std::vector<int>& local = hosts_.local();
  int here = hosts_.here, parts = static_cast<int>(local.size());
  int adder = hosts_.carrier(here, place), owner = hosts_.carrier(home, place);
  if (adder != local[static_cast<std::size_t>(hosts_.place)])
    return add_outgoing(adder, add_stage(Stage::Kind::kInput, input));
  // The mean of half types is taken here, as in an all-reduce.
  int divisor = half_ ? ranks_ : 1;
  bool adds = parts > 1 || divisor > 1;
  Stage& of_host = adds ? add_sum(home == here ? out : input, parts, hosts_.place, divisor, nullptr)
                        : add_stage(Stage::Kind::kInput, input);
  of_host.input = input;
  of_host.passes_through = adds && home != here;
  for (int part = 0; part < parts; ++part)
    if (part != hosts_.place) add_incoming(local[static_cast<std::size_t>(part)], of_host, part);
  if (home != here) return add_outgoing(owner, of_host);
  Stage& sum = add_sum(out, hosts_.count(), here, half_ ? 1 : ranks_, &of_host);
  for (int other = 0; other < hosts_.count(); ++other)
    if (other != here) add_incoming(hosts_.carrier(other, place), sum, other);
}

}  // namespace ringdp
