"""Scores of a real model on published tasks, by napkin and by lm-evaluation-harness, item by item.

The model is a GGUF file. A random sample of items of BLiMP, MMLU and GSM8K, whose files the user has, is scored in
fp32 by `napkin evaluate task`; by the harness with its own definitions of these tasks and napkin's adapter; and by the
harness with transformers, on the Hugging Face folder that napkin writes of the same file. Scores come with their
standard errors; how many items the three judge differently is counted, and the items are listed. BLiMP's sentences
stand at the beginning of a text in all three; the harness would put a space before them. GSM8K's questions follow the
first five problems of its training file, where that is given; the harness by itself draws others for each question.

    pip install lm_eval[hf]
    python benchmarks/real_scores.py model.gguf --blimp blimp/data --mmlu mmlu/test --gsm8k gsm8k/test.jsonl \
        --gsm8k-train gsm8k/train.jsonl

The table is also written to benchmarks/results/.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import napkin
from napkin.inference.lm_eval_adapter import harness_model
from result_files import existing, heading, write_result
from turns import BRACKETS, in_turns, ratio_spread, spread

Rows = list[dict[str, Any]]
Judged = tuple[list[float], str, list[str]]
"""The score of each item, the leading score with its standard error, and the texts that were generated, if any."""
SHOTS = 5
GENERATED = {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "temperature": 0.0}


def blimp_rows(folder: Path, n: int, draw: random.Random) -> Rows:
    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return draw.sample(rows, min(n, len(rows)))


def mmlu_rows(folder: Path, n: int, draw: random.Random) -> Rows:
    rows: Rows = []
    for path in sorted(folder.glob("*.csv")):
        subject = path.stem.removesuffix("_test").replace("_", " ")
        with path.open(newline="", encoding="utf-8") as file:
            for question, *choices, letter in csv.reader(file):
                # Items with two equal choices are refused by napkin, which no model could tell apart.
                if len(set(choices)) == len(choices):
                    rows.append({"question": question, "choices": choices, "letter": letter, "subject": subject})
    return draw.sample(rows, min(n, len(rows)))


def gsm8k_rows(file: Path, n: int, draw: random.Random) -> Rows:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return draw.sample(rows, min(n, len(rows)))


def write_task(name: str, rows: Rows, folder: Path) -> list[Path]:
    """The sample in the form in which the task is published."""
    place = folder / name
    place.mkdir()
    if name != "mmlu":
        path = place / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [path]
    for row in rows:
        path = place / f"{row['subject'].replace(' ', '_')}_test.csv"
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([row["question"], *row["choices"], row["letter"]])
    return sorted(place.iterdir())


def harness_task(name: str, rows: Rows, folder: Path, answer_tokens: int, shots: Path | None) -> dict[str, Any]:
    """The harness's own definition of a task, on the sample; `shots` holds examples that stand before each question."""
    path = folder / f"{name}-harness.jsonl"
    common = {"task": f"sample_{name}", "dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    common["dataset_kwargs"] = {"data_files": {"test": str(path)}}
    if name == "blimp":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return common | {
            "output_type": "multiple_choice", "doc_to_text": "", "doc_to_target": 0, "target_delimiter": "",
            "doc_to_choice": "{{[sentence_good, sentence_bad]}}", "metric_list": [{"metric": "acc"}],
        }  # fmt: skip
    if name == "mmlu":
        by_subject = sorted(rows, key=lambda row: row["subject"].replace(" ", "_"))
        numbered = [{**row, "answer": "ABCD".index(row["letter"])} for row in by_subject]
        path.write_text("".join(json.dumps(row) + "\n" for row in numbered))
        return common | {
            "output_type": "multiple_choice", "doc_to_target": "answer", "doc_to_choice": ["A", "B", "C", "D"],
            "description": "The following are multiple choice questions (with answers) about {{subject}}.\n\n",
            "doc_to_text": "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\n"
            "D. {{choices[3]}}\nAnswer:",
            "metric_list": [{"metric": "acc"}],
        }  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if shots is not None:
        common["dataset_kwargs"] = {"data_files": {"test": str(path), "train": str(shots)}}
        common |= {"training_split": "train", "fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}
        common["num_fewshot"] = SHOTS
    ignored = [",", "\\$", "(?s).*#### ", "\\.$"]
    return common | {
        "output_type": "generate_until", "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": GENERATED | {"max_gen_toks": answer_tokens},
        "metric_list": [{"metric": "exact_match", "ignore_case": True, "regexes_to_ignore": ignored}],
        "filter_list": [
            {
                "name": "flexible-extract",
                "filter": [
                    {
                        "function": "regex",
                        "group_select": -1,
                        "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)",
                    },
                    {"function": "take_first"},
                ],
            }
        ],
    }  # fmt: skip


def by_napkin(model: Path, files: Sequence[Path], folder: Path, answer_tokens: int, shots: Path | None) -> Judged:
    """The scores as the command writes them."""
    out = folder / f"{files[0].parent.name}.json"
    program = [sys.executable, "-m", "napkin", "evaluate", "task", str(model), "--out", str(out), "--task"]
    command = [*program, *map(str, files)]
    if files[0].parent.name == "gsm8k":
        command += ["--answer-tokens", str(answer_tokens)]
        command += [] if shots is None else ["--dev", str(shots), "--shots", str(SHOTS)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    leading = found["task"]["score"]
    estimate = found["scores"][leading]
    return found["item_scores"][leading], f"{estimate['mean']:.3f} ± {estimate['standard_error']:.3f}", []


def by_harness(model: Any, task: dict[str, Any]) -> Judged:
    """The scores as the harness computes them, with the texts that it has kept."""
    import lm_eval  # pyright: ignore[reportMissingImports]

    found = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0, verbosity="ERROR")
    samples = sorted(found["samples"][task["task"]], key=lambda each: each["doc_id"])
    metric = "exact_match" if task["output_type"] == "generate_until" else "acc"
    scores = [float(each[metric]) for each in samples]
    n, mean = len(scores), sum(scores) / len(scores)
    texts = [each["resps"][0][0] for each in samples] if metric == "exact_match" else []
    return scores, f"{mean:.3f} ± {(mean * (1 - mean) / (n - 1)) ** 0.5:.3f}", texts


def main() -> None:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=existing, help="a GGUF file")
    parser.add_argument("--blimp", type=existing, help="folder of BLiMP's JSONL files")
    parser.add_argument("--mmlu", type=existing, help="folder of MMLU's CSV files")
    parser.add_argument("--gsm8k", type=existing, help="GSM8K's JSONL file")
    parser.add_argument(
        "--gsm8k-train", type=existing, help=f"its training file: {SHOTS} examples before each question"
    )
    parser.add_argument("--items", type=int, nargs=3, default=[230, 300, 50], help="of BLiMP, MMLU and GSM8K")
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1, help="times that each judges all items, for the seconds")
    options = parser.parse_args()
    for package in ("lm_eval", "transformers"):
        if find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install lm_eval[hf]")
    if not any((options.blimp, options.mmlu, options.gsm8k)):
        parser.error("no task is named: add --blimp, --mmlu or --gsm8k with the files of one")
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    head = heading(f"Scores of {options.model.name}", f"fp32. {BRACKETS}", packages=["lm_eval", "transformers"])
    lines = [
        "| task | items | by | score | judged otherwise than by napkin | seconds | / napkin's |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    readers = {"blimp": blimp_rows, "mmlu": mmlu_rows, "gsm8k": gsm8k_rows}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        napkin.load(options.model).export(folder / "model")
        ours = harness_model(options.model)
        theirs = HFLM(pretrained=str(folder / "model"), device="cpu", dtype="float32", batch_size=8)
        shots = None
        if options.gsm8k_train is not None:
            shots = folder / "gsm8k-shots.jsonl"
            shots.write_text("".join(options.gsm8k_train.read_text().splitlines(keepends=True)[:SHOTS]))
        for n, (name, read) in zip(options.items, readers.items(), strict=True):
            if (given := getattr(options, name)) is None:
                continue
            rows = read(given, n, random.Random(0))
            task = harness_task(name, rows, folder, options.answer_tokens, shots)
            files = write_task(name, rows, folder)
            judges: dict[str, Callable[[], Judged]] = {
                "napkin": partial(by_napkin, options.model, files, folder, options.answer_tokens, shots),
                "lm_eval, napkin": partial(by_harness, ours, task),
                "lm_eval, transformers": partial(by_harness, theirs, task),
            }
            shown = f", {SHOTS} examples" if name == "gsm8k" and shots is not None else ""
            n_lines = len(lines)
            lines += rows_of(f"{name}{shown}", len(rows), judges, options.rounds)
            print("\n".join(lines[n_lines:]), flush=True)
    write_result("real-scores", [*head, *lines])


def rows_of(task: str, n_items: int, judges: dict[str, Callable[[], Judged]], rounds: int) -> list[str]:
    """Every judge's row of a task; all judge it in turns, and the items that napkin judges otherwise are counted."""
    judged: dict[str, Judged] = {}

    def seconds(who: str) -> float:
        begin = time.perf_counter()
        judged[who] = judges[who]()
        taken = time.perf_counter() - begin
        print(f"{task}, {who}: {taken:.1f} s", file=sys.stderr, flush=True)
        return taken

    samples = in_turns({who: partial(seconds, who) for who in judges}, rounds)
    first = next(iter(judges))
    lines = []
    for who, (scores, told, _) in judged.items():
        cells = [task, str(n_items), who, told, "", spread(samples[who], "{:.1f}".format), ""]
        if who != first:
            pairs = enumerate(zip(judged[first][0], scores, strict=True))
            differing = [number for number, (one, other) in pairs if one != other]
            which = f": items {', '.join(map(str, differing[:20]))}" if differing else ""
            cells = [
                "",
                "",
                who,
                told,
                f"{len(differing)}{which}",
                cells[5],
                ratio_spread(samples[who], samples[first]),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    texts = [said for _, _, said in judged.values() if said]
    if texts:
        equal = sum(one == other for one, other in zip(*texts, strict=True))
        lines.append(f"| | | | {equal} of {n_items} generated texts equal | | | |")
    return lines


if __name__ == "__main__":
    main()
