// By how much the loss of a backward was multiplied, from who scaled it (ringdp.amp) to who averages its gradients (the
// reducers). Kept by autograd's number of that backward, so losses with scales of their own do not mix; of the last few
// backwards only. Any thread that runs a part of the backward; no GIL needed.
#pragma once

namespace ringdp {

// Inside a backward: from the hook of the scaled loss. Outside of one, nothing happens.
void note_loss_scale(float scale);

// Of the backward this is called in; 1 if nobody scaled its loss.
float loss_scale_of_backward();

}  // namespace ringdp
