"""What a budget buys by a law of known truth: against brute force over sizes."""

import math

import pytest

from napkin.errors import NapkinError
from napkin.scaling.budget_answer import answer_budget, flops_for_less_loss, over_training
from scaling.test_ladder import base, law_of_known_truth, truth


@pytest.mark.thorough
def test_the_answers_are_those_of_brute_force() -> None:
    law = law_of_known_truth()
    answer = answer_budget(law, base(), flops=1e14, on="T4")
    per_token = 6 * answer.flops_per_token
    assert 1 < answer.flops_per_token < 2
    sizes = [10 ** (3 + step / 400) for step in range(2000)]

    def lowest(flops: float) -> tuple[float, float]:
        return min((truth(n, flops / per_token / n), n) for n in sizes)

    loss, size = lowest(1e14)
    assert answer.optimum.parameters.estimate == pytest.approx(size, rel=0.02)
    assert answer.optimum.loss.estimate == pytest.approx(loss, rel=1e-3)
    more = flops_for_less_loss(law, answer)
    assert more is not None
    assert lowest(more)[0] == pytest.approx(loss - 0.01, abs=5e-4)
    found = over_training(law, answer, 1e10)
    # B/D^β = loss − E − A/N^α is solved for D.
    left = [(n, loss - 2 - 100 / n**0.4) for n in sizes if n <= size]
    totals = [(per_token * n * (300 / rest) ** 2 + 2 * n * 1e10, n) for n, rest in left if rest > 0]
    least, smaller = min(totals)
    assert found.total_flops == pytest.approx(least, rel=0.01)
    assert found.parameters == pytest.approx(smaller, rel=0.05)
    assert found.total_flops < found.optimum_total_flops


@pytest.mark.torture
def test_time_and_money_buy_the_flops_that_the_plan_reaches() -> None:
    law = law_of_known_truth()
    hour = answer_budget(law, base(), seconds=3600.0, on="H100")
    price = hour.plan.site.usd_per_hour
    assert price is not None
    paid = answer_budget(law, base(), dollars=price, on="H100")
    assert paid.optimum.flops == pytest.approx(hour.optimum.flops)
    assert hour.dollars(hour.optimum.flops) == pytest.approx(price, rel=0.1)
    with pytest.raises(NapkinError, match="one budget"):
        answer_budget(law, base(), flops=math.nan, on="T4")
