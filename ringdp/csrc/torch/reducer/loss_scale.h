// The loss scale of a backward: ringdp.amp notes it, the reducers that average the gradients read it. Stored by
// autograd's number of that backward, so losses with different scales do not mix; for the last few backwards only. Any
// thread that runs a part of the backward; no GIL needed.
#pragma once

namespace ringdp {

// Called inside a backward, by the hook of the scaled loss. Does nothing outside of a backward.
void note_loss_scale(float scale);

// The scale of the backward in which this is called; 1 if its loss was not scaled.
float loss_scale_of_backward();

}  // namespace ringdp
