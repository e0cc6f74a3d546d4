// The reducer's messages: lists of names and ranks, and texts about gradients that are missing, came twice, or belong
// to an unfinished backward. Pure functions of values, without torch; any thread. `names` are those of the parameters
// that require grad; other vectors with a number of a parameter count these, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ringdp {

// "a.weight, a.bias, … 7 more": the first names, of about `most_bytes` or less.
std::string listed(const std::vector<std::string>& names, std::size_t most_bytes = std::string::npos);

// "rank 1" or "ranks 0, 2, 4-7": those whose entry in `ranks` is `which`; "no rank".
std::string describe_ranks(const std::vector<bool>& ranks, bool which);

// "layer1.weight, layer1.bias": at most about 200 characters; if names are left out, their number, and a hash of all,
// so that different lists have different texts.
std::string describe_names(std::span<const std::size_t> members, std::span<const std::string> names);

// "bucket 3: layer1.weight, layer1.bias": names as above.
std::string describe_bucket(std::size_t index, std::span<const std::size_t> members,
                            std::span<const std::string> names);

// In lines: the treatment of the parameters `missing`, which have no gradient on this rank. `somewhere`: by parameter,
// whether some rank has one; empty if unknown.
std::string unused_here(const std::vector<std::size_t>& missing, const std::vector<bool>& somewhere,
                        std::span<const std::string> names);
// The same about all ranks; `used`: [rank][parameter], not 0 where that rank has a gradient.
std::string unused_by_ranks(const std::vector<std::vector<uint8_t>>& used, std::span<const std::string> names);

// About parameters that require grad on some ranks only. An empty text: there are none.
struct TrainingDisagreement {
  std::string text;
  std::string first_name;
};
// `trains`: [rank][parameter of the module], `names` of all of these.
TrainingDisagreement requires_grad_disagreement(const std::vector<std::vector<bool>>& trains,
                                                std::span<const std::string> names);

// A backward that had not ended when the next step began.
struct UnfinishedBackward {
  int64_t step = 0;
  int rank = 0;
  int ranks = 1;
  std::size_t sent = 0;      // buckets
  std::size_t sending = 0;   // that had to be sent
  bool ended_short = false;  // it ran to its end without some gradients; otherwise it was interrupted
  bool static_graph = false;
  std::vector<std::size_t> missing;  // parameters without gradient, or with too few
  std::string peer_report;           // the result of notifying the other ranks; begins with a space
};
std::string unfinished_text(const UnfinishedBackward& backward, std::span<const std::string> names);
// The name of the operation that notifies the other ranks.
std::string unfinished_notice(int64_t step, const std::vector<std::size_t>& missing,
                              std::span<const std::string> names);

// With a static graph.
std::string unexpected_text(const std::string& name);
// `used_in`: the modules that have the parameter; may be empty.
std::string marked_twice_text(std::size_t parameter, const std::string& name, const std::string& used_in);

}  // namespace ringdp
