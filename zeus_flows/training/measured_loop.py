"""A training loop, measured: at each boundary the books and the tuner are told what has ended and what begins."""

from __future__ import annotations

from zeus_flows.gpu.group import Gpus
from zeus_flows.training.books import Books, For
from zeus_flows.training.setting_tuner import SettingTuner
from zeus_flows.training.training_loop import TrainingLoop


class MeasuredLoop:
    """Keeps the books and the tuner in step with a training loop.

    Args:
        loop: Where the training loop is.
        gpus: What it runs on.
        books: What it has taken.
        tuner: What turns the knob meanwhile.

    Attributes:
        books: The same.
    """

    def __init__(self, loop: TrainingLoop, gpus: Gpus, books: Books, tuner: SettingTuner) -> None:
        self._loop, self._gpus, self._tuner = loop, gpus, tuner
        self.books = books

    def enter_steps(self, mine: object, samples_per_epoch: int) -> None:
        """Begin an epoch's steps: its first batch is there."""
        loop, tuner = self._loop, self._tuner
        self.books.close(For.REST if loop.step.first_done else For.ONCE)
        if not loop.step.first_done:
            self.books.begin_again()
        if not loop.total:
            loop.total, loop.counted = samples_per_epoch, samples_per_epoch > 0
            if loop.total:
                self._gpus.samples_per_epoch = loop.total
        loop.steps, loop.left, loop.step.handed_s = mine, loop.total, None
        tuner.samples_per_epoch = loop.total
        if loop.total or not self._gpus.simulated:  # a simulated GPU's clock stands still until the length is known
            tuner.resume()

    def leave_steps(self) -> None:
        """End an epoch's steps: the loader has no more, or the train function does something else."""
        loop = self._loop
        if loop.steps is None:
            return
        loop.steps = None
        self._step_is_done()
        if not loop.total:
            self._gpus.samples_per_epoch = loop.samples
        self._tuner.pause()
        self.books.close(For.STEPS)

    def stepped_first(self, samples: int) -> None:
        """Book the first step apart and keep it out of profiles: it may include compilation."""
        self._loop.step.first_done = True
        self._tuner.drop()
        self.books.stepped_first(samples)
        if self._loop.steps is not None and (self._loop.total or not self._gpus.simulated):
            self._tuner.resume()

    def begin_evaluation(self) -> None:
        """Begin an evaluation: what came before it was steps, or the rest of an epoch."""
        if self._loop.steps is None:
            self.books.close(For.REST)
        else:
            self._step_is_done()
            self._tuner.pause()
            self.books.close(For.STEPS)
        self._loop.evaluating = True

    def end_evaluation(self, inside: object | None) -> None:
        """End an evaluation that began inside a loop over steps, or outside of one."""
        loop = self._loop
        loop.evaluating = False
        if not loop.over:
            self.evaluated()
            if inside is not None and loop.steps is inside:
                self._tuner.resume()

    def evaluated(self) -> None:
        """Book the time since the last boundary as an evaluation."""
        self._gpus.evaluated()
        self.books.close(For.EVALUATION, 1)
        self._loop.evaluated = self._loop.evaluated_once = True

    def look_back(self) -> None:
        """Find out what was done before a metric was reported, where nothing was marked as an evaluation.

        Between epochs it was one. A loop that did not ask for another batch may be at its end, or in the middle of its
        steps: where the last step took far longer than steps do, the model was evaluated after it.
        """
        loop, tuner = self._loop, self._tuner
        at_the_end = loop.counted and not loop.left
        if loop.steps is not None and (ended_s := loop.step.overdue(self._gpus.now_s())) is not None:
            tuner.drop()
            watts = tuner.average_power_w
            self._gpus.evaluated()
            self.books.close_late(ended_s, watts)
            loop.step.take()
            loop.step.first_done = True
            loop.evaluated = loop.evaluated_once = True
            if at_the_end:
                loop.steps = None
            else:
                tuner.resume()
            return
        if at_the_end:
            self.leave_steps()
        if loop.steps is None:
            self.evaluated()

    def end_epoch(self) -> None:
        """Close the books of an epoch; the first one tells how long epochs are."""
        loop = self._loop
        self.leave_steps()
        if loop.reported is not None and not loop.evaluated_once:
            self.evaluated()
        self.books.close(For.REST, 1)
        whole = not loop.cut_short or loop.samples > loop.total
        if whole and loop.samples and loop.epoch == loop.resumed + 1:
            loop.total = self._tuner.samples_per_epoch = loop.samples  # what a loader yields may be less than it has
            loop.counted = True

    def _step_is_done(self) -> None:
        """Count the step under way, where the train function has not asked for another."""
        loop, tuner = self._loop, self._tuner
        samples = loop.step.take()
        if samples and not loop.step.first_done:
            self.stepped_first(samples)
        elif samples and tuner.measuring is not None and tuner.measuring.ran(samples):
            tuner.measured()
