// A bucket's ranges in torch.profiler: one during its operation ("ringdp move …"), one while the end of backward waits
// for it ("ringdp wait …"). Their names have the bucket, the algorithm and the peers. Without a profiler they cost a
// check of a flag. Called by the BucketReducer, on its threads.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <string>

#include "torch/reducer/bucket.h"
#include "torch/reducer/reducer_group.h"

namespace ringdp {

// "bucket 3: fc.weight (ring, 4 MiB, ranks 1 and 3)", of a bucket that this rank of the group reduces.
std::string describe_for_profiler(const Bucket& bucket, const ReducerGroup& group);

// From now until `bucket.operation` has ended. Does nothing without a profiler, or if the operation does not report
// its end.
void profile_moving(const Bucket& bucket, const ReducerGroup& group);

}  // namespace ringdp
