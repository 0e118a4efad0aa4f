"""`napkin data run`, and `napkin data STAGE`: a pipeline of one stage, whose options are the fields of the stage.

`recipe` prints a pipeline to begin with, `plan` predicts its corpus and `reconcile` compares them; `why` and `samples`
say what became of documents.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
import tyro

from napkin.cli.commands import Main
from napkin.cli.common.files import folder_for
from napkin.cli.common.options import INLINED, JsonOption, command, field_docstrings, toml_comment
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, print_verbatim, say
from napkin.curation.engine.corpus_files import Amount, Manifest
from napkin.curation.engine.pipeline_file import InputOptions, OutputFormat, OutputOptions, Pipeline, read_pipeline
from napkin.curation.engine.pipeline_run import Engine, curate
from napkin.curation.reading.input_file import InputFormat
from napkin.curation.registry import STAGES, stage_class
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.units import format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from napkin.curation.engine.corpus_plan import CorpusPlan, Estimate, Flow, Reconciliation


@dataclass(frozen=True)
class RunOptions(JsonOption):
    """Make a corpus by a pipeline: a TOML file with [input], a [[stage]] for each stage and [output]. After a kill at
    any moment, the same command continues where it stopped, and the corpus is the same to the byte, with any number of
    workers. Each stage is a command too, and `napkin data STAGE --help` lists its options."""

    pipeline: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PIPELINE")]
    """The pipeline, a TOML file."""
    out: str
    """Folder of the corpus."""
    workers: int | None = None
    """Processes that work on shards; None is one per core."""
    engine: Literal["processes", "ray"] = "processes"
    """What runs the workers: processes of this machine, or a Ray cluster whose nodes see the same files at the same
    paths."""
    ray_address: str | None = None
    """Address of the Ray cluster, such as auto or 10.0.0.1:6379; None starts one on this machine."""


@command("data run", RunOptions)
def run_command(options: RunOptions) -> None:
    pipeline = read_pipeline(options.pipeline)
    run_and_print(pipeline, options, engine=options.engine, ray_address=options.ray_address)


@dataclass(frozen=True)
class StageCommand(JsonOption):
    """Options of the commands of all stages."""

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT ...")] = ()
    """Files, folders, patterns such as 'crawl/*.warc.gz', and addresses that fsspec knows."""
    out: str = ""
    """Folder of the corpus."""
    input_format: InputFormat = "auto"
    """Format of the files; `auto` takes it from the end of each name."""
    text_field: str = InputOptions.text_field
    """The field of JSON lines, or column of Parquet, that is the text."""
    output_format: OutputFormat = "jsonl.zst"
    """Format of the documents that are written."""
    workers: int | None = None
    """Processes that work on shards; None is one per core."""
    memory_bytes: int = Pipeline.memory_bytes
    """Bytes that a stage may hold that has to see all shards."""


def options_class(name: str) -> type:
    """The options of a stage's command: its own, and those of all."""
    cls = stage_class(name)
    must_be_given = any(each.default is each.default_factory for each in dataclasses.fields(cls))
    default: Any = field(kw_only=True) if must_be_given else field(default=cls(), kw_only=True)
    return dataclasses.make_dataclass(
        f"{cls.__name__}Options",
        [("stage", Annotated[cls, INLINED], default)],
        bases=(StageCommand,),
        namespace={"__doc__": cls.__doc__},
        frozen=True,
    )


def stage_command(name: str) -> Main:
    """The command of a stage."""
    return command(f"data {name}", options_class(name))(_run_stage)


def _run_stage(options: Any) -> None:
    if not options.paths:
        raise NapkinError("no INPUT is given: name files, folders, patterns or addresses")
    if not options.out:
        raise NapkinError("--out is missing: name a folder for the corpus")
    pipeline = Pipeline(
        InputOptions(options.paths, options.input_format, options.text_field),
        (options.stage,),
        OutputOptions(options.output_format),
        options.memory_bytes,
    )
    run_and_print(pipeline, options)


def run_and_print(
    pipeline: Pipeline, options: Any, *, engine: Engine = "processes", ray_address: str | None = None
) -> None:
    """Make a corpus by the `out`, `workers` and `json` of the options, or continue it, and print the result."""
    if not options.out:
        raise NapkinError("--out is empty: name a folder for the corpus")
    path = Path(options.out)
    with progress_line("reading") as line, folder_for(path):

        def progress(done: int, total: int, what: str) -> None:
            line.retitle(what)
            line(done, total, f"{format_bytes(done)} of {format_bytes(total)}" if total else "")

        outcome = curate(
            pipeline,
            path,
            workers=usable_cores() if options.workers is None else options.workers,
            engine=engine,
            ray_address=ray_address,
            on_progress=progress,
            on_message=lambda message: notify(f"data: {message}"),
        )
    manifest = outcome.manifest
    if options.json:
        print_json({"out": options.out, "was_finished": outcome.was_finished, "manifest": manifest})
        return
    if outcome.was_finished:
        say(f"{path} is finished: nothing is left to do")
    print_table(["stage", "rule", "documents", "bytes", "of documents"], _rows(manifest), align="llrrr")
    if manifest.set_aside:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in manifest.set_aside.items())
        say(f"set aside, as set_aside.jsonl lists: {reasons}")
    say(
        f"wrote {path}: {manifest.documents:,} documents, {format_bytes(manifest.text_bytes)} of text in "
        f"{len(manifest.files):,} files"
    )


def _rows(manifest: Manifest) -> list[list[str]]:
    rows = [_row("read", "", manifest.input.read, manifest.input.read)]
    for stage in manifest.stages:
        for rule, amount in sorted(stage.dropped.items(), key=lambda each: (-each[1].documents, each[0])):
            rows.append(_row(stage.name, rule, amount, stage.entered, sign="-"))
        rows.append(_row(stage.name, "remain", stage.remained, stage.entered))
    return rows


def _row(stage: str, rule: str, amount: Amount, of: Amount, sign: str = "") -> list[str]:
    share = format_share(amount.documents / of.documents) if of.documents else "–"
    return [stage, rule, f"{sign}{amount.documents:,}", f"{sign}{format_bytes(amount.bytes)}", share]


@dataclass(frozen=True)
class WhyOptions(JsonOption):
    """Tell a document's story: where it comes from, what each stage did to it, and why it was dropped if it was."""

    identity: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """Identity of the document: the name of its file, #, and its number in it, such as pages/a.warc.gz#12."""
    corpus: Annotated[str, tyro.conf.arg(name="in")]
    """Folder of the corpus."""


@command("data why", WhyOptions)
def why_command(options: WhyOptions) -> None:
    from napkin.curation.engine.document_story import find_story

    story = find_story(Path(options.corpus), options.identity)
    if options.json:
        print_json(story)
        return
    say(f"{story.identity}: {story.ending}")
    rows = [["source", f"{story.source}, byte {story.offset:,}"]]
    rows += [["address", story.address]] if story.address else []
    rows += [["licence", story.licence]] if story.licence else []
    rows += [["found", f"{name} = {value}"] for name, value in story.fields.items()]
    rows += [[entry.stage, entry.note or "went on"] for entry in story.trace]
    print_table([], rows)


@dataclass(frozen=True)
class BandingOptions(JsonOption):
    """Print the probability with which bands of a MinHash signature find two documents, by their similarity: what the
    stage near-duplicates will drop."""

    threshold: float = 0.8
    """The Jaccard similarity from which documents are near-duplicates; bands and rows are chosen for it."""
    hashes: int = 128
    """Numbers of a signature."""
    bands: int = 0
    """Bands of a signature. 0: chosen by the threshold."""
    rows: int = 0
    """Numbers of a band. 0: chosen by the threshold."""


@command("data banding", BandingOptions)
def banding_command(options: BandingOptions) -> None:
    from napkin.curation.deduplication.stages import NearDuplicates

    stage = NearDuplicates(threshold=options.threshold, hashes=options.hashes, bands=options.bands, rows=options.rows)
    banding = stage.banding
    similarities = sorted({*(tenth / 10 for tenth in range(1, 11)), 0.95, options.threshold})
    probabilities = {similarity: float(banding.probability(similarity)) for similarity in similarities}
    if options.json:
        rows = [{"similarity": similarity, "found": share} for similarity, share in probabilities.items()]
        print_json({"bands": banding.bands, "rows": banding.rows, "hashes": options.hashes, "pairs": rows})
        return
    print_table(
        ("Jaccard similarity", "pairs found"),
        [(f"{similarity:.3g}", format_share(share)) for similarity, share in probabilities.items()],
    )
    formula = f"1 - (1 - s^{banding.rows})^{banding.bands}"
    say(f"{banding.bands} bands of {banding.rows} rows, of {options.hashes} hashes: {formula} at similarity s")


@dataclass(frozen=True)
class SamplesOptions:
    """Write a page with samples of what each rule of each stage dropped, beside samples of what remained."""

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """Folder of the corpus."""
    out: str | None = None
    """The page; None is samples.html in the folder of the corpus."""


@command("data samples", SamplesOptions)
def samples_command(options: SamplesOptions) -> None:
    from napkin.curation.engine.document_story import write_sample_page

    corpus = Path(options.corpus)
    path = corpus / "samples.html" if options.out is None else Path(options.out)
    say(f"wrote {write_sample_page(corpus, path)}")


@dataclass(frozen=True)
class PlanOptions(JsonOption):
    """Predict what a pipeline will make of its input, from a sample of it: documents, bytes and tokens after each
    stage with intervals of 90%, seconds of each stage on this machine, disk and dollars. Nothing is written but the
    plan. Stages that compare documents find few duplicates in a sample: their intervals are wide, and a larger --share
    narrows them."""

    pipeline: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PIPELINE")]
    """The pipeline, a TOML file."""
    share: float = 0.001
    """Share of the input's bytes that is read, but at least 8 MB and at most 268 MB."""
    tokenizer: str | None = None
    """Tokenizer file to count tokens with; None takes 4 bytes per token."""
    workers: int | None = None
    """Processes that would work on shards; None is one per core."""
    dollars_per_core_hour: float | None = None
    """Price of a core, for the dollars of the whole run."""
    out: str | None = None
    """File for the plan, JSON, which `napkin data reconcile` compares with the corpus."""


@command("data plan", PlanOptions)
def plan_command(options: PlanOptions) -> None:
    from napkin.curation.engine.corpus_plan import plan_corpus
    from napkin.curation.engine.pipeline_file import read_pipeline
    from napkin.files import already_exists
    from napkin.hardware.host import usable_cores
    from napkin.json_files import write_json
    from napkin.tokenizer.tokenizer_file import load_tokenizer

    pipeline = read_pipeline(options.pipeline)
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    path = None if options.out is None else Path(options.out)
    if path is not None and path.exists():
        raise already_exists(path)
    with progress_line("reading") as line:
        plan = plan_corpus(
            pipeline,
            share=options.share,
            count_tokens=None if tokenizer is None else lambda text: len(tokenizer.encode(text)),
            workers=usable_cores() if options.workers is None else options.workers,
            dollars_per_core_hour=options.dollars_per_core_hour,
            on_progress=lambda done, total, what: (line.retitle(what), line(done, total, ""))[0],
        )
    if path is not None:
        with folder_for(path.parent):
            write_json(path, plan)
    if options.json:
        print_json(plan)
        return
    print_plan(plan)
    if path is not None:
        say(f"wrote {path}")


@dataclass(frozen=True)
class ReconcileOptions(JsonOption):
    """Compare a finished corpus with its plan: documents and bytes after each stage, and the seconds of each."""

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """Folder of the corpus."""
    plan: str
    """The plan, as `napkin data plan --out` wrote it."""


@command("data reconcile", ReconcileOptions)
def reconcile_command(options: ReconcileOptions) -> None:
    from napkin.curation.engine.corpus_plan import read_plan, reconcile

    reconciled = reconcile(Path(options.corpus), read_plan(Path(options.plan)))
    if options.json:
        print_json(reconciled)
    else:
        print_reconciliation(reconciled)


def print_plan(plan: "CorpusPlan") -> None:
    """Print what is expected at each place of the pipeline, and what it takes."""
    rows = [_flow_row("read", plan.read, plan.read_seconds)]
    for stage in plan.stages:
        rows.append(_flow_row(stage.name, stage.remained, stage.seconds))
        largest = sorted(stage.dropped.items(), key=lambda each: -each[1])[:5]
        rows += [[f"  {rule}", f"-{format_count(round(n))}", "", "", ""] for rule, n in largest]
    rows.append(["written", "", format_bytes(plan.corpus_bytes), "", format_seconds(plan.write_seconds)])
    tokens = "tokens" if plan.tokens_are_counted else "tokens at 4 bytes"
    print_table(["after", "documents", "bytes of text", tokens, "seconds of a core"], rows, align="lrrrr")
    say(
        f"from a sample of {format_share(plan.sampled_share)} of the documents in {format_bytes(plan.input_bytes)}, of "
        f"{plan.sampled_files:,} of {plan.input_files:,} files; in brackets intervals of 90%"
    )
    if any(stage.compares for stage in plan.stages):
        say("stages that compare documents find few duplicates in a sample: a larger --share narrows what follows them")
    cost = "" if plan.dollars is None else f", ${plan.dollars:,.2f}"
    say(f"it takes about {format_seconds(plan.seconds)} with {plan.workers} workers{cost}")


def print_reconciliation(reconciled: "Reconciliation") -> None:
    """Print plan and meter side by side, stage by stage."""
    rows = []
    for row in reconciled.rows:
        show = format_bytes if row.what == "bytes" else format_count
        ratio = f"{row.metered / row.planned.value:.3f}" if row.planned.value else "–"
        figures = [_interval(row.planned, show), show(round(row.metered)), ratio]
        rows.append([row.place, row.what, *figures, "yes" if row.is_inside else "no"])
    print_table(["after", "what", "planned", "metered", "meter / plan", "in the interval"], rows, align="llrrrl")
    inside = sum(row.is_inside for row in reconciled.rows)
    say(f"{inside:,} of {len(reconciled.rows):,} figures are in their intervals of 90%")
    if reconciled.stage_seconds:
        rows = [
            [name, format_seconds(planned), format_seconds(metered), f"{metered / planned:.2f}" if planned else "–"]
            for name, planned, metered in reconciled.stage_seconds
        ]
        print_table(["stage", "planned seconds", "metered seconds", "meter / plan"], rows, align="lrrr")


def _flow_row(name: str, flow: "Flow", seconds: float) -> list[str]:
    figures = ((flow.documents, format_count), (flow.bytes, format_bytes), (flow.tokens, format_count))
    return [name, *(_interval(estimate, show) for estimate, show in figures), format_seconds(seconds)]


def _interval(estimate: "Estimate", show: Callable[[int], str]) -> str:
    value = show(round(estimate.value))
    return (
        value
        if estimate.low == estimate.high
        else f"{value} [{show(round(estimate.low))} – {show(round(estimate.high))}]"
    )


STANDARD = (
    *("extract", "language", "gopher", "gopher-repetition", "fineweb"),
    *("duplicates", "near-duplicates", "duplicate-lines", "personal-data"),
)
"""The order in which stages run: cheap ones that drop much first, those that compare documents later, and those that
change a text last."""
_CHANGED: dict[str, dict[str, Any]] = {"input": {"paths": ["pages/"]}, "language": {"keep": ["en"]}}
"""Options of the printed pipeline that differ from the defaults: the rules of `gopher` are for English."""
_INTRODUCTION = """A pipeline for `napkin data plan` and `napkin data run`, from raw pages to a corpus. Stages run in \
this order; those at the end, before [output], are not in use: move one to its place and take away its first #. \
Options have their defaults, but for input.paths and the languages that are kept, and one that is left out has its \
default, too. Dots stand where an option has no default."""


@dataclass(frozen=True)
class PipelineRecipeOptions:
    """Print a pipeline as TOML, with a comment on each option: napkin data recipe > pipeline.toml. Without the name of
    a stage it is a complete one for web pages, with the stages that it does not use behind it as comments."""

    stages: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="STAGE ...")] = ()
    """Stages of the pipeline, in order: napkin data recipe length near-duplicates."""


@command("data recipe", PipelineRecipeOptions)
def recipe_command(options: PipelineRecipeOptions) -> None:
    print_verbatim(commented_pipeline(options.stages).removesuffix("\n"))


def commented_pipeline(stages: tuple[str, ...] = ()) -> str:
    """A pipeline of these stages as TOML; of none, the standard one, and the other stages as comments.

    Raises NapkinError for an unknown stage.
    """
    memory = field_docstrings(Pipeline)["memory_bytes"]
    blocks = [
        toml_comment(_INTRODUCTION),
        [*toml_comment(memory), *_assigned("memory_bytes", Pipeline.memory_bytes)],
        ["[input]", *_options(InputOptions, "input")],
        *(_stage(name) for name in stages or STANDARD),
        *([f"# {line}".rstrip() for line in _stage(name)] for name in STAGES if not stages and name not in STANDARD),
        ["[output]", *_options(OutputOptions, "output")],
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _stage(name: str) -> list[str]:
    cls = stage_class(name)
    about = STAGES[name].about
    return [*toml_comment(f"{about[0].upper()}{about[1:]}."), "[[stage]]", f'name = "{name}"', *_options(cls, name)]


def _options(cls: type[Any], name: str) -> list[str]:
    """A line for each field, below its docstring; as a comment where it is None."""
    docs, lines = field_docstrings(cls), list[str]()
    for each in dataclasses.fields(cls):
        text = docs.get(each.name, "")
        if each.default is not dataclasses.MISSING:
            value = _CHANGED.get(name, {}).get(each.name, each.default)
        elif each.default_factory is not dataclasses.MISSING:
            value = each.default_factory()
        else:
            value, text = None, f"To be given: {text[0].lower()}{text[1:]}"
        lines += toml_comment(text)
        lines += [f"# {each.name} = ..."] if value is None else _assigned(each.name, value)
    return lines


def _assigned(name: str, value: Any) -> list[str]:
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, list):
        return [f"{name} = [{', '.join(_assigned('x', each)[0].removeprefix('x = ') for each in value)}]"]
    return tomli_w.dumps({name: value}).rstrip("\n").split("\n")
