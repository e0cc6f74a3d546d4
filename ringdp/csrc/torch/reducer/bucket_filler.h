// BucketFiller: writes this rank's gradients into their buckets, and launches full buckets. A bucket is launched when
// it is full and all buckets before it have been launched. Owned by the Reducer, used under its lock by the threads
// that run backward, without the GIL.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "torch/reducer/backward_state.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/reducer_stats.h"
#include "torch/reducer/step_failure.h"
#include "torch/reducer/step_report.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

class BucketFiller {
 public:
  BucketFiller(GradientLayout& layout, ArrivalTracker& arrivals, const BackwardState& backward, UsedMap& used,
               StepFailure& failure, StepTimes& times, StepReport& report)
      : layout_(layout),
        arrivals_(arrivals),
        backward_(backward),
        used_(used),
        failure_(failure),
        times_(times),
        report_(report) {}

  // A backward begins: parameters that will not have a gradient are ready at once.
  void begin();
  // Throws if the parameter's gradient has arrived before, or is not in the static graph.
  void arrived(std::size_t parameter);
  // The backward has run to its end: launches the rest of the buckets, with zeros for missing gradients. Returns the
  // parameters without gradient on this rank.
  std::vector<std::size_t> finish();
  // Sends a bucket that was not sent during backward, and for which some rank has a gradient.
  void send_late(Bucket& bucket);
  // Sends all launched buckets again, with the same gradients, to the present members of an elastic group.
  void send_again();

 private:
  std::vector<std::size_t> never_to_come() const;
  void write(std::size_t parameter, bool late = false);
  void mark_ready(std::size_t parameter);
  void launch(Bucket& bucket);
  void send(Bucket& bucket, const std::string& note = {});

  GradientLayout& layout_;
  ArrivalTracker& arrivals_;
  const BackwardState& backward_;
  UsedMap& used_;
  StepFailure& failure_;
  StepTimes& times_;
  StepReport& report_;
};

}  // namespace ringdp
