"""Hugging Face Trainer: `RingTrainer`, after `ringdp.init`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringdp.integrations.libraries import imported

if TYPE_CHECKING:
    import transformers
else:
    transformers = imported("transformers", package="transformers>=5.23")


class RingTrainer(transformers.Trainer):
    """A Trainer whose model is a RingDP.

    Call `ringdp.init` before making the TrainingArguments: these choose the device and, without it, the process group.
    The ``ddp_…`` arguments go to RingDP. For a Trainer class of your own (Seq2SeqTrainer, …), name both:
    ``class MyTrainer(RingTrainer, Seq2SeqTrainer): pass``.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator as the Trainer does, then let it wrap in RingDP."""
        from ringdp.integrations.accelerate import use_ringdp

        super().create_accelerator_and_postprocess()
        use_ringdp(self.accelerator)
