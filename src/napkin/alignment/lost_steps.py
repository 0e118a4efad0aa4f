"""Steps of reinforcement learning in which nothing could be learned, said when a run ends."""

from napkin.runs.metrics import StepMetrics
from napkin.training.loop import Callback, TrainingLoop

REASONS = {
    "equal_groups": "all answers to each prompt had the same reward: use prompts that are neither too hard nor too "
    "easy, or a larger rl.group_size",
    "cut_share": "every answer was cut: use a larger rl.max_answer",
}
"""By a figure that is 1 in such a step, why, and what may help."""


class LostSteps(Callback):
    """Counts them in this process."""

    def __init__(self) -> None:
        self.steps = 0
        self.lost = dict.fromkeys(REASONS, 0)

    def after_step(self, loop: TrainingLoop, metrics: StepMetrics) -> StepMetrics:
        """Count the step."""
        self.steps += 1
        for figure in REASONS:
            self.lost[figure] += (metrics.figures or {}).get(figure) == 1
        return metrics

    def on_end(self, loop: TrainingLoop) -> None:
        """Say how many there were, where they are more than half of all."""
        for figure, n in self.lost.items():
            if 2 * n > self.steps:
                loop.on_message(f"in {n:,} of {self.steps:,} steps {REASONS[figure]}")
