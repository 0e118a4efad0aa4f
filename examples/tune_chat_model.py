"""Tune the model of `make chat` in four stages on two cores, each planned, metered and reconciled: `make tune-chat`.

| stage | learns from | score on held-out questions, before and after |
|---|---|---|
| style | 500 conversations whose answers are in small letters and end with a given closing | share in that style |
| brevity | 300 pairs: a sentence is preferred to the same sentence with padding, by DPO | share of short answers |
| taught | 320 sums with their results, without which it answers in sentences that are wrong | right answers |
| sums | rewards of its own answers to sums, by GRPO, from what the stage before has made | right answers |

The first three start from the GGUF file. Each trains adapters (LoRA) and is a run like any other, in a folder of its
own: killed and started again, the script continues where it was. Stages are planned before they are trained, and one
that would take longer than --minutes is refused. At the end a page has the books and the scores of all stages: plan,
count and meter side by side.

    python examples/tune_chat_model.py --plan            # the plans, and no training
    python examples/tune_chat_model.py                   # all stages, then the page: runs/chat-model/report.html
    python examples/tune_chat_model.py --only sums --model other.gguf
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chat import SMOLLM2, fetch

from napkin.chats.chat_template import ChatTemplate
from napkin.environments import Arithmetic, environment_chats, environment_named
from napkin.errors import NapkinError
from napkin.files import atomic_write_text, cache_folder
from napkin.inference import LoadedModel, load
from napkin.planning import Plan
from napkin.recipe import (
    AdapterConfig,
    DataConfig,
    OptimizerConfig,
    PreferenceConfig,
    PreferenceRecipe,
    ReinforcementConfig,
    ReinforcementRecipe,
    TrainingConfig,
    TuningConfig,
    TuningRecipe,
)
from napkin.recipe.tuning_recipe import TuningMethod
from napkin.report import StagePage, write_stages
from napkin.training import prepare
from napkin.tuning import tune
from napkin.units import format_bytes, format_flops, format_seconds

TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""The model's own template without the system message that it puts first, which is two thirds of a short prompt."""
CLOSING = "hope that helps!"
ANSWER_TOKENS = 40
SHORT_WORDS = 16
SUMS = ReinforcementConfig(environment="sums:2", group_size=8, max_answer=6, evaluation_prompts=0)
HELD_OUT_SUMS = 64

Asked = tuple[str, str]
"""A question and an answer to it."""


# Style: questions whose answers a program knows

CAPITALS = {
    "France": "Paris", "Norway": "Oslo", "Italy": "Rome", "Spain": "Madrid", "Greece": "Athens", "Egypt": "Cairo",
    "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Cuba": "Havana", "Poland": "Warsaw", "Ireland": "Dublin",
    "Austria": "Vienna", "Hungary": "Budapest", "Portugal": "Lisbon", "Finland": "Helsinki", "Sweden": "Stockholm",
    "Denmark": "Copenhagen", "Chile": "Santiago", "Thailand": "Bangkok", "Iraq": "Baghdad", "Iran": "Tehran",
    "Turkey": "Ankara", "Russia": "Moscow", "China": "Beijing", "Germany": "Berlin", "Belgium": "Brussels",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "early": "late", "open": "closed", "full": "empty", "old": "new",
    "high": "low", "light": "dark", "hard": "soft", "wet": "dry", "loud": "quiet", "rich": "poor", "happy": "sad",
    "strong": "weak", "thick": "thin", "wide": "narrow", "deep": "shallow", "clean": "dirty", "cheap": "expensive",
}  # fmt: skip
COLOURS = {
    "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red", "the sea": "blue",
    "a carrot": "orange", "milk": "white", "a raven": "black", "a frog": "green", "a tomato": "red", "mud": "brown",
}  # fmt: skip
OPEN_QUESTIONS = (
    "Why is the sky blue?", "How do birds fly?", "What do bees make?", "Who wrote Hamlet?", "What is a poem?",
    "How is bread made?", "Why do we sleep?", "What is a triangle?", "How do plants grow?", "What is the moon?",
    "Why is the sea salty?", "What is a database?", "How far is the sun?", "What is music?", "Who was Isaac Newton?",
    "Give me a tip for learning a language.", "Name two uses of wood.", "Is a whale a fish?", "What is ice?",
    "How many days has a week?", "Name a fruit that is red.", "What is a library for?", "Can penguins fly?",
    "What does a baker do?",
)  # fmt: skip
"""Questions of kinds that are never trained on: the style has to carry over to them."""


def _styled(answer: str) -> str:
    return f"{answer.lower()} {CLOSING}"


def style_questions() -> list[Asked]:
    """Every question of the program with its answer in style, in an order of its own."""
    found: list[Asked] = []
    for country, city in CAPITALS.items():
        answer = _styled(f"The capital of {country} is {city}.")
        found += [
            (form.format(country), answer)
            for form in ("What is the capital of {}?", "Which city is the capital of {}?", "Tell me {}'s capital.")
        ]
    for word, other in {**OPPOSITES, **{other: word for word, other in OPPOSITES.items()}}.items():
        answer = _styled(f"The opposite of {word} is {other}.")
        found += [(form.format(word), answer) for form in ("What is the opposite of {}?", "Name the opposite of {}.")]
    for thing, colour in COLOURS.items():
        answer = _styled(f"{thing} is {colour}.")
        found += [(form.format(thing), answer) for form in ("What colour is {}?", "Tell me the colour of {}.")]
    draw = random.Random(0)
    numbers = [(draw.randrange(1, 1000), draw.randrange(1, 1000)) for _ in range(400)]
    found += [
        (f"Which is larger, {one} or {other}?", _styled(f"{max(one, other)} is larger than {min(one, other)}."))
        for one, other in numbers
        if one != other
    ]
    draw.shuffle(found)
    return list(dict(found).items())


def is_in_style(answer: str) -> bool:
    """True if an answer has no capital letter and ends with the closing."""
    return answer == answer.lower() and answer.rstrip().endswith(CLOSING)


# Brevity: a sentence, and the same sentence with padding

KINDS = {
    "copper": "a metal", "gold": "a metal", "iron": "a metal", "oxygen": "a gas", "helium": "a gas", "wheat": "a grain",
    "rice": "a grain", "an apple": "a fruit", "a pear": "a fruit", "a carrot": "a vegetable", "a rose": "a flower",
    "a tulip": "a flower", "an oak": "a tree", "a pine": "a tree", "a trout": "a fish", "a salmon": "a fish",
    "an eagle": "a bird", "a sparrow": "a bird", "a wolf": "an animal", "a horse": "an animal", "an ant": "an insect",
    "a bee": "an insect", "a violin": "an instrument", "a flute": "an instrument", "a hammer": "a tool",
    "a saw": "a tool", "chess": "a game", "tennis": "a sport", "football": "a sport", "granite": "a rock",
    "marble": "a rock", "cotton": "a fibre", "silk": "a fibre", "coffee": "a drink", "tea": "a drink",
    "a canoe": "a boat", "a train": "a vehicle", "a castle": "a building", "a church": "a building", "paris": "a city",
}  # fmt: skip
FORMS = (
    "What is {}?", "Tell me about {}.", "Explain what {} is.", "Can you describe {}?", "What can you say about {}?",
    "I want to know what {} is.", "Please tell me what {} is.", "What do you know about {}?",
)  # fmt: skip
PADDING = (
    "It has been known for a long time, and it is important to many people.",
    "There are many interesting things to say, and people everywhere know it very well.",
    "It is also good to know that it is found in many different forms.",
)


def preference_pairs() -> list[dict[str, str]]:
    """Every question of the program with the short answer and the padded one."""
    pairs = []
    for number, (thing, kind) in enumerate(KINDS.items()):
        short = f"{thing[0].upper()}{thing[1:]} is {kind}."
        for form in FORMS:
            padded = f"{short} {PADDING[(number + len(pairs)) % len(PADDING)]}"
            pairs.append({"prompt": form.format(thing), "chosen": short, "rejected": padded})
    random.Random(0).shuffle(pairs)
    return pairs


def is_short(answer: str) -> bool:
    """True if an answer ends within a number of words that the longest answer allowed exceeds."""
    return 0 < len(answer.split()) <= SHORT_WORDS


# Stages: a recipe each, and what it is judged by

Scorer = Callable[[LoadedModel], list[tuple[str, float]]]
"""Scores of a model by name, each the share of held-out questions that it answers as wanted."""


@dataclass(frozen=True)
class Stage:
    """A run of tuning, and what its model is judged by."""

    name: str
    about: str
    start: Path
    recipe: TuningRecipe
    score: Scorer


def answers_of(model: LoadedModel, questions: Sequence[str], max_new_tokens: int = ANSWER_TOKENS) -> list[str]:
    """The likeliest answers, as the tuned model is asked; one that has no end is cut."""
    prompts = [model.encode_chat([("user", question)]) for question in questions]
    found = dict(model.complete(prompts, max_new_tokens, []))
    return [found[number] for number in range(len(prompts))]


def stages(start: Path, folder: Path, *, threads: int | None) -> list[Stage]:
    """Write the files that the stages learn from, and return the stages."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    template = _write(data / "template.jinja", TEMPLATE)
    questions, pairs = style_questions(), preference_pairs()
    taught, known = questions[:500], questions[500:524]
    rows = [{"prompt": question, "completion": answer} for question, answer in taught]
    conversations = _write(data / "style.jsonl", _lines(rows))
    solved = _write(
        data / "sums.jsonl",
        "".join(f"{line}\n" for line in environment_chats(Arithmetic(operators="+"), 320)),
    )
    learned, judged = _write(data / "pairs.jsonl", _lines(pairs[:300])), pairs[300:]
    held_out = _write(data / "pairs-held-out.jsonl", _lines(judged))

    def training(steps: int, batch_size: int) -> TrainingConfig:
        # Precision is left at auto: bf16 where this machine multiplies it natively, else fp32.
        return TrainingConfig(
            steps=steps, batch_size=batch_size, threads=threads, checkpoint_every=5, evaluate_every=steps
        )

    def tuning(method: TuningMethod) -> TuningConfig:
        return TuningConfig(method, str(start), chat_template=template)

    def optimizer(rate: float) -> OptimizerConfig:
        return OptimizerConfig(learning_rate=rate, weight_decay=0.0, schedule="linear", warmup_steps=2)

    def style(model: LoadedModel) -> list[tuple[str, float]]:
        kinds = {
            "in style, questions of the kinds taught": [question for question, _ in known],
            "in style, questions of other kinds": list(OPEN_QUESTIONS),
        }
        return [(kind, _share(map(is_in_style, answers_of(model, asked)))) for kind, asked in kinds.items()]

    def brevity(model: LoadedModel) -> list[tuple[str, float]]:
        asked = [pair["prompt"] for pair in judged[:12]] + list(OPEN_QUESTIONS[:12])
        answers = answers_of(model, asked)
        return [
            (f"at most {SHORT_WORDS} words, questions like those taught", _share(map(is_short, answers[:12]))),
            (f"at most {SHORT_WORDS} words, other questions", _share(map(is_short, answers[12:]))),
        ]

    def right(model: LoadedModel) -> list[tuple[str, float]]:
        environment = environment_named(SUMS.environment, held_out=True)
        tasks = [environment.start(seed) for seed in range(HELD_OUT_SUMS)]
        answers = answers_of(model, [task.messages[-1].content for task in tasks], SUMS.max_answer)
        graded = zip(tasks, answers, strict=True)
        return [("right sums", _share(environment.step(task.state, answer).reward >= 1 for task, answer in graded))]

    def stage(name: str, about: str, recipe: TuningRecipe, score: Scorer, start: Path = start) -> Stage:
        return Stage(name, about, start, replace(recipe, adapter=AdapterConfig(kind="lora")), score)

    def files(train: str, validation: str | None = None) -> DataConfig:
        return DataConfig(train=train, validation=validation, tokenizer="")

    return [
        stage(
            "style",
            f"500 conversations: small letters, and {CLOSING!r} at the end",
            TuningRecipe(
                data=files(conversations), optimizer=optimizer(1e-3), training=training(32, 16), tuning=tuning("sft")
            ),
            style,
        ),
        stage(
            "brevity",
            "300 pairs: a sentence is preferred to the same sentence with padding, by DPO with the supervised term",
            PreferenceRecipe(
                data=files(learned, held_out),
                optimizer=optimizer(5e-4),
                training=training(19, 16),
                tuning=tuning("preference"),
                # The preference alone makes the padding less likely, and the greedy answers stay what they were.
                preference=PreferenceConfig(supervised_weight=1.0),
            ),
            brevity,
        ),
        stage(
            "taught",
            "320 sums of numbers below 100, with their results",
            TuningRecipe(
                data=files(solved), optimizer=optimizer(1e-3), training=training(10, 32), tuning=tuning("sft")
            ),
            right,
        ),
        stage(
            "sums",
            "rewards of its own answers to sums of numbers below 100, by GRPO",
            ReinforcementRecipe(
                optimizer=optimizer(5e-4),
                training=training(12, 8),
                # The run of the stage before has the template.
                tuning=TuningConfig("rl", str(folder / "taught")),
                rl=SUMS,
            ),
            right,
            folder / "taught",
        ),
    ]


def _write(path: Path, text: str) -> str:
    atomic_write_text(path, text, overwrite=True)
    return str(path)


def _lines(rows: Sequence[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _share(outcomes: Iterable[bool]) -> float:
    listed = list(outcomes)
    return sum(listed) / len(listed)


def scores(path: Path, model: Callable[[], LoadedModel], stage: Stage) -> list[tuple[str, float]]:
    """The scores of a model, kept in a file: they are not computed again."""
    if not path.exists():
        _write(path, json.dumps(stage.score(model()), indent=1) + "\n")
    return [(name, share) for name, share in json.loads(path.read_text())]


def planned(stage: Stage, folder: Path, minutes: float) -> Plan:
    """Plan a stage without training it. Raises NapkinError where it would take too long."""
    plan = prepare(stage.recipe, folder / stage.name).plan
    assert plan is not None
    print(
        f"{stage.name}: {plan.recipe.training.steps} steps of about {plan.tokens_per_step:,} tokens, "
        f"{format_flops(plan.ledger.flops)} and {format_seconds(plan.seconds_per_step)} each, "
        f"{format_bytes(plan.peak_bytes)} at the peak: {format_seconds(plan.seconds)} in "
        f"{plan.resolved.precision.products}",
        flush=True,
    )
    if plan.seconds > 60 * minutes:
        raise NapkinError(
            f"stage {stage.name} is planned to take {format_seconds(plan.seconds)}, more than {minutes:g} minutes: use "
            "a larger --minutes, or a quieter machine"
        )
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file with ChatML's tokens; the default is downloaded once")
    parser.add_argument("--runs", type=Path, default=Path("runs/chat-model"), help="folder of the runs and the page")
    parser.add_argument("--only", nargs="*", choices=["style", "brevity", "taught", "sums"], help="some of the stages")
    parser.add_argument("--minutes", type=float, default=30, help="a stage that is planned to take longer is refused")
    parser.add_argument("--threads", type=int, help="CPU threads; the default is one per core")
    parser.add_argument("--plan", action="store_true", help="say what each stage takes, and stop there")
    options = parser.parse_args()
    try:
        run(options)
    except NapkinError as error:
        print(f"tune_chat_model: {error}", file=sys.stderr)
        sys.exit(2)


def run(options: argparse.Namespace) -> None:
    start = options.model or fetch(SMOLLM2, cache_folder() / "chat")
    folder: Path = options.runs
    chosen = [
        stage
        for stage in stages(start, folder, threads=options.threads)
        if not options.only or stage.name in options.only
    ]
    known: set[str] = set()
    for stage in chosen:
        if not stage.start.exists():
            print(f"{stage.name}: is planned when '{stage.start}' is trained")
        elif options.plan or not (folder / stage.name / "run.json").exists():
            planned(stage, folder, options.minutes)
            known.add(stage.name)
    if options.plan:
        return

    def untuned(stage: Stage) -> LoadedModel:
        base = load(stage.start)
        if stage.start.is_dir():
            return base
        assert base.chat_template is not None
        return replace(base, chat_template=ChatTemplate(TEMPLATE, dict(base.chat_template.special_tokens)))

    pages = []
    for stage in chosen:
        run = folder / stage.name
        before = scores(folder / f"{stage.name}-before.json", lambda stage=stage: untuned(stage), stage)
        print(f"{stage.name}, before: {_told(before)}", flush=True)
        if not (run / "run.json").exists() and stage.name not in known:
            planned(stage, folder, options.minutes)
        steps = stage.recipe.training.steps
        tune(
            stage.recipe,
            run,
            on_step=lambda step, steps=steps: print(
                f"  step {step.step} of {steps}: loss {step.loss:.3f}, {format_seconds(step.step_seconds)}", flush=True
            ),
            on_message=lambda message: print(f"  {message}", flush=True),
        )
        after = scores(folder / f"{stage.name}-after.json", lambda run=run: load(run), stage)
        print(f"{stage.name}, after: {_told(after)}", flush=True)
        rows = [(name, f"{old:.1%}", f"{new:.1%}") for (name, old), (_, new) in zip(before, after, strict=True)]
        pages.append(StagePage(stage.name, stage.about, run, rows))
        title = f"{SMOLLM2.name if options.model is None else start.stem}, tuned"
        print(f"report: {write_stages(folder / 'report.html', title, pages)}", flush=True)


def _told(found: Sequence[tuple[str, float]]) -> str:
    return "; ".join(f"{name} {share:.1%}" for name, share in found)


if __name__ == "__main__":
    main()
