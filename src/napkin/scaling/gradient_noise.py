"""The critical batch size from gradient noise (McCandlish et al. 2018, An Empirical Model of Large-Batch Training)."""

from dataclasses import dataclass

from napkin.errors import NapkinError


@dataclass(frozen=True)
class GradientNoise:
    """The differences among gradients of single examples."""

    squared_gradient: float
    """|G|²: the squared norm of the true gradient."""
    noise: float
    """tr Σ: the trace of the covariance of the gradients of single examples."""

    @property
    def simple_noise_scale(self) -> float:
        """B_simple = tr Σ / |G|² in examples: at this batch size a step makes half the progress of one with the exact
        gradient, so that the critical batch size is about this (equations 2.9 and 2.11)."""
        return self.noise / self.squared_gradient

    def progress(self, batch_size: float) -> float:
        """The progress of a step with this batch size over that of one with the exact gradient: 1/(1 + B_simple/B)."""
        return 1 / (1 + self.simple_noise_scale / batch_size)


def noise_of_gradients(
    small_batch: float, small_squared_norm: float, large_batch: float, large_squared_norm: float
) -> GradientNoise:
    """Estimate |G|² and tr Σ without bias from the squared norms of gradients at two batch sizes (appendix A.1).

    E |G_B|² = |G|² + tr Σ / B. Both estimates scatter: average the squared norms of many steps first. Batches are in
    examples, the smaller one such as that of one rank or micro-batch. Raises NapkinError for batch sizes that are not
    in order, and norms whose noise hides the gradient.
    """
    if not 0 < small_batch < large_batch < float("inf"):
        raise NapkinError(f"batch sizes are {small_batch:g} and {large_batch:g}: give a smaller and a larger one")
    if not (0 < small_squared_norm < float("inf") and 0 < large_squared_norm < float("inf")):
        raise NapkinError("squared norms of gradients have to be above 0: give means over steps")
    squared = (large_batch * large_squared_norm - small_batch * small_squared_norm) / (large_batch - small_batch)
    noise = (small_squared_norm - large_squared_norm) / (1 / small_batch - 1 / large_batch)
    if squared <= 0 or noise <= 0:
        raise NapkinError(
            f"squared norms {small_squared_norm:g} and {large_squared_norm:g} give no noise scale, as their own noise "
            "is larger than what tells them apart: average over more steps"
        )
    return GradientNoise(squared, noise)
