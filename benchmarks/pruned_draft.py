"""A draft for speculation of a model that has no smaller sibling: layers are pruned, and what is left is distilled.

The model answers questions, a part of its layers is kept (`napkin prune`), the answers teach it (`napkin tune distill`
with the whole model as teacher), and it is written as a GGUF file (`napkin export`). Then the model answers held-out
questions greedily: alone, with the draft, and with a lookup in what was said before. Passes of the model count what
speculation could gain at most; seconds are of this machine, and those of its processor depend less on what else runs.

    python benchmarks/pruned_draft.py model.gguf --folder draft --n-layers 8 --steps 10
    python benchmarks/pruned_draft.py model.gguf --folder draft     # again: what is there is not made again
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import napkin
from napkin.files import atomic_write_text
from napkin.inference.generation import continue_prompt
from napkin.inference.settings import Sampling, Speculation
from napkin.inference.speculation import SpeculationMeter, speculate
from result_files import existing, heading

TOPICS = (
    "the moon", "volcanoes", "bread", "the printing press", "honey bees", "glaciers", "chess", "the heart", "rivers",
    "steam engines", "photosynthesis", "jazz", "coral reefs", "bridges", "vaccines", "the telephone", "deserts",
    "whales", "democracy", "sleep", "gravity", "paper", "earthquakes", "the Roman Empire", "bicycles", "tea", "clouds",
    "magnets", "novels", "the stock market", "forests", "computers", "dinosaurs", "the ocean", "bacteria", "comets",
)  # fmt: skip
FORMS = (
    "Tell me about {}.", "Why are people interested in {}?", "Write a short paragraph about {}.",
    "Give me three facts about {}.", "Explain {} to a child.", "What should I know about {}?",
    "Write the first lines of a story about {}.", "How would you describe {} in one sentence?",
)  # fmt: skip
HELD_OUT = tuple(
    form.format(topic)
    for topic in ("lighthouses", "the violin", "rainbows", "penguins", "castles", "the piano")
    for form in FORMS[:4]
)
"""Of topics that no answer teaches."""


def questions() -> list[str]:
    """The questions whose answers teach the draft."""
    return [form.format(topic) for form in FORMS for topic in TOPICS]


def answered(model: napkin.LoadedModel, path: Path, max_new_tokens: int) -> None:
    """Write conversations of the questions and the model's likeliest answers."""
    prompts = [model.encode_chat([("user", question)]) for question in questions()]
    found: dict[int, str] = {}
    for first in range(0, len(prompts), 16):
        batch = prompts[first : first + 16]
        found |= {first + number: text for number, text in model.complete(batch, max_new_tokens, [])}
        print(f"  {len(found)} of {len(prompts)} questions answered", flush=True)
    rows = [{"prompt": question, "completion": found[n]} for n, question in enumerate(questions()) if found[n].strip()]
    atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    atomic_write_text(path.with_suffix(".txt"), "\n\n".join(row["completion"] for row in rows) + "\n")


def command(*arguments: object) -> None:
    """Run a command of napkin, as it is documented."""
    print("$ napkin", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "napkin", *map(str, arguments)], check=True)


def made(start: Path, folder: Path, *, n_layers: int, steps: int, answer_tokens: int) -> Path:
    """Make the draft, and return its GGUF file; each part is made once."""
    folder.mkdir(parents=True, exist_ok=True)
    answers = folder / "answers.jsonl"
    if not answers.exists():
        answered(napkin.load(start), answers, answer_tokens)
    name = f"{n_layers}-layers"
    pruned, run, draft = folder / f"{name}-pruned", folder / name, folder / f"{name}-{steps}.gguf"
    texts = answers.with_suffix(".txt")
    if not pruned.exists():
        given = ("--calibration-text", texts, "--calibration-tokens", 4096, "--window", 256)
        held_out = ("--evaluation-text", texts, "--evaluation-tokens", 2000)
        command("prune", start, "--n-layers", n_layers, *given, *held_out, "--out", pruned)
    if steps == 0:
        run = pruned
    elif not (run / "report.html").exists():
        data = ("--tuning.start", pruned, "--distillation.teacher", start, "--data.train", answers)
        how = ("--training.steps", steps, "--training.batch-size", 16, "--optimizer.learning-rate", 5e-4)
        loss = ("--distillation.weight", 1.0, "--optimizer.warmup-steps", 3, "--training.checkpoint-every", steps)
        command("tune", "distill", *data, *how, *loss, "--run", run)
    if not draft.exists():
        command("export", run, "--out", draft, "--to", "q8_0")
    return draft


Answer = Callable[[Sequence[int], SpeculationMeter], Iterator[Any]]


def measured(model: napkin.LoadedModel, draft: Path, tokens: int, n: int) -> None:
    """Print passes, acceptance and seconds of each way of answering the held-out questions."""
    prompts = [model.encode_chat([("user", question)]) for question in HELD_OUT[: max(1, n)]]
    sampling = Sampling(temperature=0.0, top_p=1.0, stop_ids=model.stop_ids)
    with_draft = model.proposer(Speculation(draft=str(draft)))
    with_lookup = model.proposer(Speculation(lookup=3))
    assert with_draft is not None
    assert with_lookup is not None
    ways: dict[str, Answer] = {"alone": lambda ids, meter: continue_prompt(model.model, ids, tokens, sampling)}
    for title, proposer in (("draft", with_draft), ("lookup", with_lookup)):
        for proposed in (1, 2, 4, None):
            ways[f"{title}, {proposed or 'planned'}"] = lambda ids, meter, proposer=proposer, proposed=proposed: (
                speculate(model.model, ids, tokens, sampling, proposer, proposed=proposed, meter=meter)
            )
    texts: dict[str, list[list[int]]] = {name: [] for name in ways}
    meters = {name: SpeculationMeter() for name in ways}
    seconds, processor = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for way in ways.values():
        list(way(prompts[0], SpeculationMeter()))  # compiled, and read into memory
    for number, ids in enumerate(prompts):
        print(f"  answer {number + 1} of {len(prompts)}", flush=True)
        # In turns, so that what else the machine does meets all ways.
        for name, way in ways.items():
            begin, used = time.perf_counter(), time.process_time()
            texts[name].append([drawn.token for drawn in way(ids, meters[name])])
            seconds[name] += time.perf_counter() - begin
            processor[name] += time.process_time() - used
    n_tokens = sum(map(len, texts["alone"]))
    print(f"{len(prompts)} answers, {n_tokens:,} tokens, {torch.get_num_threads()} threads")
    print(f"{'':16} {'equal':>9} {'accepted':>9} {'tokens/pass':>12} {'speed':>7} {'of processor':>13}")
    for name in ways:
        meter = meters[name]
        equal = sum(a == b for a, b in zip(texts[name], texts["alone"], strict=True))
        share = f"{meter.accepted / meter.tested:.1%}" if meter.tested else ""
        per_pass = f"{meter.tokens_per_pass:.2f}" if meter.passes else "1.00"
        gains = (seconds["alone"] / seconds[name], processor["alone"] / processor[name])
        print(f"{name:16} {equal:>5}/{len(prompts)} {share:>9} {per_pass:>12} {gains[0]:>6.2f}x {gains[1]:>12.2f}x")
        if meter.passes:
            print(f"{'':16} {meter}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=existing, help="a GGUF file of a model of conversations")
    parser.add_argument("--folder", type=Path, default=Path("draft"), help="where the draft is made")
    parser.add_argument("--n-layers", type=int, default=8, help="layers of the draft")
    parser.add_argument("--steps", type=int, default=10, help="steps of distillation, of 16 answers each; 0 is none")
    parser.add_argument("--answer-tokens", type=int, default=64, help="longest answer that teaches")
    parser.add_argument("--tokens", type=int, default=64, help="longest held-out answer")
    parser.add_argument("--answers", type=int, default=len(HELD_OUT), help="held-out questions")
    options = parser.parse_args()
    heading("A draft that is pruned and distilled")
    draft = made(
        options.model,
        options.folder,
        n_layers=options.n_layers,
        steps=options.steps,
        answer_tokens=options.answer_tokens,
    )
    measured(napkin.load(options.model), draft, options.tokens, options.answers)


if __name__ == "__main__":
    main()
