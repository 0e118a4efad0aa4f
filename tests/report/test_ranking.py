"""Which run is said to be the best: by what it was not trained on, or none where nothing compares the runs."""

import json
from pathlib import Path

import pytest

from napkin.report.comparison import ComparedRun, differences, rank, read_run
from napkin.report.overfitting import overfitting
from report.test_report_charts import logged


@pytest.fixture
def make_run(tmp_path: Path):
    def make(
        name: str,
        losses: list[tuple[float, float | None]],
        *,
        tokenizer: str = "one",
        validation: str = "v.tokens",
        bits: float | None = None,
        text_bytes: int = 1000,
        recipe: str = "",
    ) -> ComparedRun:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.toml").write_text(f'{recipe}\n[data]\nvalidation = "{validation}"\n')
        (folder / "tokenizer.json").write_text(json.dumps({"fingerprint": tokenizer, "merges": []}))
        lines = [
            {"step": step, "tokens": step, "seconds": step, "loss": training, "validation_loss": validation_loss}
            for step, (training, validation_loss) in enumerate(losses, 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if bits is not None:
            evaluation = {"step": len(losses), "tokens": 10, "bytes": text_bytes, "loss": 1.0, "perplexity": 2.7}
            evaluation |= {"bits_per_byte": bits, "gzip_bits_per_byte": 3.0, "xz_bits_per_byte": 2.8}
            (folder / "evaluation.json").write_text(json.dumps(evaluation))
        return read_run(folder, training=False)

    return make


def names(runs: tuple[ComparedRun, ...]) -> list[str]:
    return [run.summary.name for run in runs]


def test_the_run_with_the_lowest_training_loss_is_not_the_best_if_another_predicts_unseen_text_better(make_run) -> None:
    overfitted = make_run("overfitted", [(4.0, 4.2), (2.0, 3.4), (0.5, 4.4)])
    sound = make_run("sound", [(4.0, 4.1), (3.2, 3.5), (3.0, 3.3)])
    ranking = rank([overfitted, sound])
    assert ranking.by == "validation loss"
    assert names(ranking.ranked) == ["sound", "overfitted"]
    assert ranking.statements[0].startswith("sound has the lowest validation loss, 3.3000 nats per token at step 3")
    assert ranking.statements[1].startswith("The lowest training loss is that of overfitted, 0.5000. It does not")
    assert ranking.statements[2] == (
        "overfitted is overfitted: the validation loss rose from its lowest, 3.4000 at step 2, to 4.4000 at step 3, "
        "while the training loss fell from 2.0000 to 0.5000."
    )


def test_an_overfitted_run_that_was_once_the_best_is_said_to_have_lost_it(make_run) -> None:
    overfitted = make_run("overfitted", [(4.0, 4.2), (2.0, 3.0), (0.5, 4.4)])
    sound = make_run("sound", [(4.0, 4.1), (3.2, 3.5), (3.0, 3.3)])
    assert rank([sound, overfitted]).statements[0] == (
        "overfitted came to the lowest validation loss, 3.0000 nats per token at step 2, but not with its last "
        "weights: 4.4000 at its end; the lowest validation loss at the end is that of sound, 3.3000."
    )


def test_equal_runs_have_no_winner(make_run) -> None:
    one, two = (make_run(name, [(4.0, 4.2), (3.0, 3.3)]) for name in ("one", "two"))
    statement = "one and two have the same lowest validation loss, 3.3000 nats per token."
    assert rank([one, two]).statements == (statement,)


def test_a_run_without_validation_is_not_ranked(make_run) -> None:
    blind = make_run("blind", [(4.0, None), (0.1, None)])
    runs = [blind, make_run("one", [(4.0, 4.0)]), make_run("two", [(4.0, 3.9)])]
    ranking = rank(runs)
    assert (names(ranking.ranked), names(ranking.others)) == (["two", "one"], ["blind"])
    said = "blind has no validation loss and cannot be ranked: a training loss does not replace it."
    assert ranking.statements[-1] == said
    alone = rank([blind])
    assert (alone.by, alone.ranked, names(alone.others)) == (None, (), ["blind"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"tokenizer": "two"}, "different tokenizers"), ({"validation": "w.tokens"}, "different token files")],
)
def test_losses_of_other_tokens_are_not_compared(make_run, change: dict[str, str], reason: str) -> None:
    one, two = make_run("one", [(4.0, 4.0)]), make_run("two", [(1.0, 1.0)], **change)
    ranking = rank([one, two])
    assert ranking.by is None
    assert ranking.statements[0].startswith("The losses cannot be compared: ")
    assert reason in ranking.statements[0]
    assert not any("lowest" in statement for statement in ranking.statements)


def test_runs_with_different_tokenizers_are_compared_by_bits_per_byte_of_the_same_text(make_run) -> None:
    one = make_run("one", [(4.0, 4.0)], bits=1.5)
    two = make_run("two", [(1.0, 1.0)], tokenizer="two", bits=2.0)
    ranking = rank([two, one])
    assert (ranking.by, names(ranking.ranked)) == ("bits per byte", ["one", "two"])
    assert ranking.statements[1] == "one has the fewest bits per byte, 1.50 at step 1."
    other_text = make_run("three", [(1.0, 1.0)], tokenizer="two", bits=1.0, text_bytes=999)
    assert rank([one, other_text]).by is None


@pytest.mark.parametrize(
    ("training", "validation", "is_overfitted"),
    [
        ([3, 2, 1], [3, 2, 3], True),
        ([3, 2, 1], [3, 2, 2.01], False),
        ([3, 2, 2.5], [3, 2, 3], False),
        ([3, 2, 1], [3, 2, 1.5], False),
        ([3, 2, 1], [None, None, None], False),
    ],
    ids=["overfitted", "noise", "diverging", "sound", "never evaluated"],
)
def test_a_run_is_overfitted_if_validation_rises_while_training_falls(training, validation, is_overfitted) -> None:
    metrics = [
        logged(10 * step, loss=loss, validation_loss=validation_loss)
        for step, (loss, validation_loss) in enumerate(zip(training, validation, strict=True), 1)
    ]
    assert (overfitting(metrics) is not None) == is_overfitted


def test_only_what_differs_between_the_recipes_is_shown(make_run) -> None:
    one = make_run("one", [(4.0, 4.0)], recipe="[model]\nd_model = 64\nbias = true\nn_heads = 2")
    two = make_run("two", [(4.0, 4.0)], recipe="[model]\nd_model = 96\nbias = false\nn_heads = 2\nnorm = 'none'")
    assert differences([one, two]) == {
        "model.d_model": ["64", "96"],
        "model.bias": ["true", "false"],
        "model.norm": ["–", "none"],
    }
    assert differences([one, one]) == {}
