"""Bad input: one line that says what, where and the way out; status 2; nothing made, changed or removed."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("place")

Refusal = Callable[..., str]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("trian", r"napkin: there is no command 'trian': did you mean `napkin train`\?"),
        ("zzz", "napkin: there is no command 'zzz': `napkin --help` lists them"),
        (
            "tokenizer trian docs",
            r"tokenizer: there is no command 'tokenizer trian': did you mean `napkin tokenizer train`\?",
        ),
        ("tokenizer train", "tokenizer: no TEXT is given: name a file, a folder, or stdlib:"),
        ("train --training.stepz 3", r"there is no option '--training.stepz': did you mean --training.steps\?"),
        ("train --steps 3", r"there is no option '--steps': did you mean --training.steps\?"),
        ("train --model.no-tie-embedings", r"did you mean --model.no-tie-embeddings\?"),
        ("generate runs/tiny --seeed 3", r"there is no option '--seeed': did you mean --seed\?"),
        ("generate runs/tiny --prompts -x", "no option '-x': .* write --option=VALUE for a value that begins with -"),
        ("evaluate runs/tiny extra", "'extra' is one argument too many"),
        ("train --training.steps 5 tiny.toml", "'tiny.toml' is one argument too many, or in the wrong place"),
        ("generate", "generate: missing from napkin generate: RUN Folder of the run"),
        ("train --training.steps abc", "train: --training.steps: 'abc' is not a whole number: `napkin train --help`"),
        ("train --training.steps 1e30", "--training.steps: '1e30' is not a whole number"),
        ("train --training.steps 2.5", "--training.steps: '2.5' is not a whole number"),
        ("train --model.n-kv-heads x", "--model.n-kv-heads: 'x' is not a whole number and not None"),
        ("train --optimizer.eps x", "--optimizer.eps: 'x' is not a number"),
        ("train --training.precision int4", "invalid choice 'int4' for argument '--training.precision'"),
        ("train --training.steps", "missing value for argument '--training.steps'"),
        ("calibrate --device tpu", "invalid choice 'tpu' for argument '--device'"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_nearest_right_one(refusal: Refusal, command: str, line: str) -> None:
    assert re.search(line, refusal(*command.split()))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("model.d-model", value) for value in ("0", "-8", str(10**9), "15")],
        *[("model.n-layers", value) for value in ("0", str(10**9))],
        *[("model.vocab-size", value) for value in ("-1", "100", str(10**12))],
        *[("model.context-length", value) for value in ("0", str(10**12))],
        *[("model.rope-theta", value) for value in ("nan", "0", "inf")],
        *[("model.norm-eps", value) for value in ("nan", "-1", "inf")],
        *[("optimizer.learning-rate", value) for value in ("-1", "nan", "1e30")],
        *[("optimizer.beta1", value) for value in ("1", "-0.1", "nan")],
        *[("optimizer.clip-norm", value) for value in ("0", "inf")],
        *[("optimizer.warmup-steps", value) for value in ("6", "-1")],
        *[("training.steps", value) for value in ("0", "-5", "9" * 30)],
        *[("training.batch-size", value) for value in ("0", str(10**15))],
        *[("training.micro-batch-size", value) for value in ("0", "3")],
        *[("training.threads", value) for value in ("0", "1000000")],
        *[("training.init-seed", value) for value in ("-1", "9" * 40)],
        ("training.evaluation-tokens", "0"),
        ("training.checkpoint-every", "0"),
    ],
)
def test_an_impossible_number_is_refused_with_its_limit(refusal: Refusal, option: str, value: str) -> None:
    line = refusal("train", "tiny.toml", "--run", "new", f"--{option}", value)
    assert option.partition(".")[2].replace("-", "_") in line
    assert ": use " in line or ": choose " in line or ": leave " in line


@pytest.mark.parametrize(
    ("toml", "line"),
    [
        ("[model", "'bad.toml' is not TOML"),
        ("\0", "'bad.toml' is not TOML"),
        (b"\xff\xfe", "'bad.toml' is not TOML"),
        ("[model]\nd_modle = 3", r"'bad.toml': unknown field 'model.d_modle': did you mean 'model.d_model'\?"),
        ("[modle]\nd_model = 3", r"unknown field 'modle': did you mean 'model'\?"),
        ("x = 1", "unknown field 'x': use one of data, model, optimizer, training"),
        ("[training]\nsteps = 'many'", r"'bad.toml': Expected `int`, got `str` - at `training.steps`"),
        ("[training]\nsteps = true", "Expected `int`, got `bool` - at `training.steps`"),
        ("[training]\nprecision = 'int4'", "Invalid enum value 'int4' - at `training.precision`"),
        ("[model]\ntie_embeddings = 1", "Expected `bool`, got `int` - at `model.tie_embeddings`"),
        ("model = 3", "Expected `object`, got `int` - at `model`"),
        ("[[training]]\nsteps = 1", "got `array` - at `training`"),
        ("[training]\nsteps = 0", "'bad.toml': training.steps is 0: use 1 to"),
        ("[training]\nsteps = " + "9" * 5000, "'bad.toml' holds a value that cannot be read"),
        ("x = " + "[" * 100_000, "'bad.toml' holds a value that cannot be read"),
        ("[optimizer]\nlearning_rate = nan", "'bad.toml': optimizer.learning_rate is nan"),
        ("[model]\nd_model = 10\nn_heads = 3", "'bad.toml': d_model 10 does not divide into n_heads 3"),
        ("[training]\nbatch_size = 7\nmicro_batch_size = 2", "does not divide into micro-batches of 2"),
        ("[optimizer]\nwarmup_steps = 1000", "warmup_steps 1000 does not fit into training.steps 1000"),
        ("[data]\ntrain = ''", "there is no token file ''"),
        ('[data]\ntrain = "\\u0000"', "there is no token file"),
    ],
    ids=lambda value: str(value)[:40].encode("unicode_escape").decode(),
)
def test_a_wrong_recipe_is_refused_with_its_field(refusal: Refusal, toml: str | bytes, line: str) -> None:
    Path("bad.toml").write_bytes(toml if isinstance(toml, bytes) else toml.encode())
    assert re.search(line, refusal("train", "bad.toml", "--run", "new"))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train none.toml", "'none.toml' does not exist: name a recipe"),
        ("train docs", "'docs' cannot be read"),
        ("train tiny.toml", "'runs/tiny' exists and is not overwritten: continue it with `napkin resume runs/tiny`"),
        ("train tiny.toml --run one.txt", "'one.txt' exists"),
        ("train tiny.toml --run one.txt/run", "'one.txt/run' cannot be created"),
        ("train tiny.toml --run new --data.train none.tokens", "there is no token file 'none.tokens': make it with"),
        ("train tiny.toml --run new --data.train docs", "there is no token file 'docs'"),
        ("train tiny.toml --run new --data.train data/train.tokens none", "there is no token file 'none'"),
        ("train tiny.toml --run new --data.train a=1 b", "give every file a weight, or none"),
        ("train tiny.toml --run new --data.train a=0", "the weight of 'a' is 0.0: use a number above 0"),
        ("train tiny.toml --run new --data.train a a", "data.train names 'a' twice"),
        ("train tiny.toml --run new --data.train", "data.train names no token file: name one or more"),
        (
            "train tiny.toml --run new --data.train one.txt",
            "'one.txt.json' is missing.*make them again with `napkin tokenizer encode",
        ),
        ("train tiny.toml --run new --data.train a=1 a=2", "it names a file twice: name it once"),
        ("train tiny.toml --optimizer.lr 1", r"no option '--optimizer.lr': did you mean --optimizer.learning-rate\?"),
        ("train tiny.toml --optimizer.zq 1", r"no option '--optimizer.zq': `napkin train --help` tells more"),
        ("train tiny.toml --run new --data.validation none", "or do without: --data.validation None"),
        ("train tiny.toml --run new --data.tokenizer none", "there is no tokenizer file 'none': make one with"),
        ("train tiny.toml --run new --data.tokenizer one.txt", "one.txt is not an intact tokenizer file"),
        ("train tiny.toml --run new --data.train one/train.tokens", "'one/train.tokens' was made by another tokenizer"),
        ("train tiny.toml --run new --model.context-length 5000", "or --model.context-length 512"),
        ("evaluate runs/tiny --tokens one/validation.tokens", "was made by another tokenizer"),
        ("evaluate runs/tiny --tokens docs", "there is no token file 'docs': name one with --tokens"),
        ("plan --data.tokenizer none", "the vocabulary is unknown: give its size with --model.vocab-size"),
        ("tokenizer train none --out new.json", "'none' does not exist"),
        ("tokenizer train docs", "'data/tokenizer.json' exists and is not overwritten"),
        ("tokenizer train docs --out one.txt/t.json", "the folder 'one.txt' cannot be made"),
        ("tokenizer train docs --out new.json --vocab-size 256", "vocab_size 256 is outside 257"),
        ("tokenizer train docs --out new.json --pattern ((", "is not a regular expression"),
        ("tokenizer train docs --out new.json --suffixes .zz", "no text that ends in .zz found in 'docs'"),
        ("tokenizer train docs --out new.json --validation-fraction 1", "leaves no text for training"),
        ("tokenizer encode docs", "'data/train.tokens' exists and is not overwritten"),
        ("tokenizer encode docs --out one.txt", "the folder 'one.txt' cannot be made"),
        ("tokenizer encode docs none --out new/deep", "'none' does not exist"),
        ("tokenizer encode docs --out new --validation-fraction nan", "fraction of nan is not possible"),
        ("tokenizer encode docs --out new --validation-fraction 1.5", "fraction of 1.5 is not possible"),
        ("tokenizer encode docs --out new --validation-fraction 1", "leaves no text for training"),
        ("tokenizer encode docs --out new --validation-fraction 1e-9", "leaves no text for validation"),
        ("tokenizer encode docs --out new --tokenizer none", "none cannot be read"),
        ("generate runs/tiny --tokens 0", "--tokens is 0: use 1 or more"),
        ("generate runs/tiny --temperature nan", "temperature is nan"),
        ("generate runs/tiny --temperature inf", "temperature is inf"),
        ("generate runs/tiny --top-p 2", "top_p is 2.0"),
        ("generate runs/tiny --seed -1", "seed is -1"),
        ("generate runs/tiny --prompts", "--prompts names no text"),
        ("generate runs/tiny --prompts \ud800", r"argument '\\ud800' is not UTF-8 at character 0"),
        ("demo --folder one.txt/x", "'one.txt/x' cannot be used"),
        *[
            (f"{command} {path}", "it does not exist" if path == "none" else "it holds (no|neither) run.json")
            for command in ("resume", "evaluate", "generate", "report")
            for path in ("none", "docs", "one.txt")
        ],
    ],
)
def test_a_wrong_path_or_value_is_refused_with_the_way_out(refusal: Refusal, command: str, line: str) -> None:
    assert re.search(line, refusal(*command.split(" ")))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "'bad.txt' contains no text"),
        (b" \n\t\n", "'bad.txt' contains no text"),
        (b"hi", "--validation-fraction 0.05 leaves no text for validation"),
        (b"abc\xff\xfe", "'bad.txt' is not UTF-8 at byte 3"),
    ],
)
def test_a_text_that_is_none_is_refused(refusal: Refusal, content: bytes, line: str) -> None:
    Path("bad.txt").write_bytes(content)
    assert line in refusal("tokenizer", "encode", "bad.txt", "--out", "new/deep")


def test_a_bad_byte_in_the_last_of_many_files_leaves_nothing_behind(refusal: Refusal) -> None:
    Path("docs/zz.txt").write_bytes(b"fine so far \xff")
    assert "'docs/zz.txt' is not UTF-8 at byte 12" in refusal("tokenizer", "encode", "docs", "--out", "new/deep")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "shortened": lambda data: data[:-7],
    "altered": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "emptied": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("data/train.tokens", "train tiny.toml --run new"),
        ("data/train.tokens.json", "train tiny.toml --run new"),
        ("data/validation.tokens", "evaluate runs/tiny"),
        ("data/tokenizer.json", "train tiny.toml --run new"),
        ("runs/tiny/tokenizer.json", "generate runs/tiny"),
        ("runs/tiny/checkpoints/step-00000006/model.safetensors", "generate runs/tiny"),
        ("runs/tiny/checkpoints/step-00000006/state.json", "evaluate runs/tiny"),
    ],
)
def test_a_damaged_file_is_refused_by_name(refusal: Refusal, file: str, command: str, damage: str) -> None:
    path = Path(file)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert path.name.removesuffix(".json") in refusal(*command.split())


def test_a_damaged_checkpoint_is_not_resumed_from(refusal: Refusal) -> None:
    path = Path("runs/tiny/checkpoints/step-00000006/optimizer.safetensors")
    path.write_bytes(DAMAGES["altered"](path.read_bytes()))
    assert path.name in refusal("resume", "runs/tiny", "--json")


def test_a_run_without_a_checkpoint_cannot_generate(refusal: Refusal) -> None:
    shutil.rmtree("runs/tiny/checkpoints/step-00000006")
    assert "has no checkpoint yet: train it with `napkin resume runs/tiny`" in refusal("generate", "runs/tiny")


def test_a_file_nested_without_end_is_refused(refusal: Refusal) -> None:
    plan = json.loads(Path("runs/tiny/plan.json").read_text())
    deep = json.dumps(plan)[:-1] + ', "unknown": ' + "[" * 100_000
    Path("runs/tiny/plan.json").write_text(deep)
    refusal("report", "runs/tiny")


@pytest.mark.thorough
def test_a_batch_that_cannot_fit_is_refused_with_one_that_does(refusal: Refusal) -> None:
    line = refusal(*"plan --model.vocab-size 4096 --model.n-layers 1 --training.batch-size 1000000".split())
    assert re.search(r"a step needs [\d.]+ TB, .* for a step .*: with --training.micro-batch-size \d+ it needs ", line)


@pytest.mark.thorough
def test_a_model_that_cannot_fit_is_refused_without_a_micro_batch(refusal: Refusal) -> None:
    sizes = ("--model.d-model", "131072", "--model.n-layers", "2", "--model.n-heads", "1024")
    line = refusal("plan", "--model.vocab-size", "1000000", *sizes, printed=True)
    assert "no micro-batch size is small enough, use a smaller --model.d-model or --model.n-layers" in line
