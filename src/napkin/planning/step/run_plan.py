"""The plan of a run, before its first step: rule and count, time and cost, and whether it fits."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from napkin.accounting.ledger import Ledger
from napkin.accounting.pricing import NOT_COMPILED, CompileEstimate, Price, dollars, kilowatt_hours, mfu
from napkin.accounting.quantities import QuantityRow, QuantityTable
from napkin.accounting.rank_seconds import Communication
from napkin.accounting.rules import adamw_bytes_rule, bytes_per_parameter, seconds_rule
from napkin.checkpoint.folder import checkpoint_bytes
from napkin.model.config import adapted_matrices
from napkin.planning.layouts.layout_plan import LayoutPlan, SumAndCount
from napkin.planning.rules import parameters_by_rule, parameters_formula, step_flops_by_rule
from napkin.planning.step.deterministic_price import DeterministicPrice
from napkin.planning.step.site import Site, fits
from napkin.recipe.precision import NARROW
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.runs.accounting_files import PlannedFile, PredictedLoss
from napkin.train_step.step import adapter_of, held_dtype
from napkin.units import format_bytes, format_count, format_flops, format_seconds, format_three_digits

FROZEN_BYTES, CHECKPOINT_BYTES = "frozen bytes", "checkpoint bytes"


RULE_MFU = 0.5


@dataclass(frozen=True, repr=False)
class Plan:
    """The prediction of a run: the ledger of one device's step, its price, and the devices that it is for."""

    resolved: ResolvedRecipe
    """The recipe with every default written out."""
    ledger: Ledger
    """The ledger of one device's step: its rows of the batch, the bytes of its part of the model."""
    price: Price
    site: Site
    ranks: Mapping[int, Ledger] = field(default_factory=dict)
    """The ledgers of several ranks of a pipeline, by rank; empty where all ranks take as much as the first."""
    layout: LayoutPlan | None = None
    """The step of several devices of a catalogue, with what ranks wait for, part by part; the plan's seconds are
    its."""
    operator_seconds: float | None = None
    """Seconds of rank 0's operators, before they were scaled to what the layout's busiest rank computes; see
    `computing`."""
    communication: Communication = field(default_factory=Communication)
    """The collectives of each device in a step."""
    communication_seconds: float = 0.0
    """Seconds per step, overlapped with computation or not."""
    bubble_seconds: float = 0.0
    """Seconds per step in which a rank of a pipeline waits for other stages."""
    exposed_seconds: float = 0.0
    """Seconds per step that are not overlapped with computation."""
    compile_estimate: CompileEstimate = NOT_COMPILED
    """The costs and savings of compilation. The ledger is of the uncompiled step; the seconds include compilation."""
    compiled: Ledger | None = None
    """The ledger of the step with compiled blocks, where the run compiles them; the plan's bytes are its."""
    deterministic: DeterministicPrice | None = None
    """The cost of deterministic algorithms, if the run uses them on a GPU."""
    graph_bytes: int = 0
    """Bytes that the private pool of a CUDA graph keeps reserved; 0 where none is recorded."""
    epochs: float | None = None
    """The number of times that all steps read the training files; None where there are none yet."""
    mixture: tuple[PlannedFile, ...] = ()
    """The part of each training file that all steps read, where there are several."""
    warnings: tuple[str, ...] = ()
    """Lines about training files that are read too often."""
    predicted_loss: PredictedLoss | None = None
    """The loss by a scaling law, if one was given."""

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def memory(self) -> Ledger:
        """The ledger that has the bytes of rank 0's step: the compiled step's where blocks are compiled."""
        return self.ledger if self.compiled is None else self.compiled

    @property
    def steps(self) -> int:
        return self.recipe.training.steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of all devices together."""
        return self.recipe.tokens_per_step

    @property
    def rule_parameters(self) -> int:
        """Parameters by the closed form."""
        return parameters_by_rule(self.recipe.model)

    @property
    def rule_flops(self) -> float:
        """FLOPs of a step of one device by the closed form."""
        return step_flops_by_rule(self.recipe.model, self.tokens_per_step / self.site.n_devices)

    @property
    def rule_seconds(self) -> float:
        return self.steps * seconds_rule(self.rule_flops, self.site.matmul_peak, mfu=RULE_MFU)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the rank that needs most."""
        return max(ledger.peak_bytes for ledger in (self.memory, *self.ranks.values()))

    @property
    def pipeline_peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each rank of a pipeline, if all were counted; otherwise of rank 0, for all ranks."""
        if len(self.ranks) == self.resolved.layout.pipeline:
            return tuple(self.ranks[rank].peak_bytes for rank in sorted(self.ranks))
        return (self.memory.peak_bytes,)

    @property
    def fits(self) -> bool:
        """True if that fits into the device's memory, as `site.fits` says."""
        return fits(self.peak_bytes + self.graph_bytes, self.site.memory_bytes)

    @property
    def disturbed(self) -> bool:
        """True if it was measured beside other processes: seconds are upper bounds, peaks lower ones."""
        return self.site.disturbed or self.price.disturbed

    @property
    def seconds_per_step(self) -> float:
        """Seconds of one step, exposed communication and a pipeline's bubble included."""
        computing = self.price.seconds - self.compile_estimate.seconds_less
        if self.deterministic is not None and not self.site.measured:
            computing += self.deterministic.seconds_beside
        return computing + self.exposed_seconds + self.bubble_seconds

    @property
    def seconds(self) -> float:
        """Seconds of all steps and of compilation, without evaluations and checkpoints."""
        return self.steps * self.seconds_per_step + self.compile_estimate.seconds_once

    @property
    def expert_seconds(self) -> float:
        """Seconds of a step that grow with the tokens that are sent to one rank's experts; 0 where ranks do not divide
        experts, or where experts have a capacity."""
        if self.layout is not None:
            return self.layout.expert_seconds
        if self.resolved.layout.expert == 1 or self.recipe.model.expert_capacity is not None:
            return 0.0
        computing = sum(spent.seconds for name, spent in self.price.by_module.items() if name.endswith(".experts"))
        link = self.site.interconnect
        return computing + (self.communication.only("all_to_all").seconds(link) if link else 0.0)

    @property
    def dollars(self) -> float | None:
        """Price of all steps; None where it is not known."""
        return None if self.site.usd_per_hour is None else dollars(self.seconds, self.site.usd_per_hour)

    @property
    def computing(self) -> SumAndCount | None:
        """Seconds of a step that ranks of a layout compute, by phase, beside those of rank 0's counted operators; None
        without a layout."""
        if self.layout is None:
            return None
        parts = {
            kind: seconds
            for kind, seconds in self.layout.by_kind.items()
            if kind != "bubble" and not kind.endswith("exposed")
        }
        return SumAndCount(parts, self.operator_seconds)

    @property
    def kilowatt_hours(self) -> float | None:
        """Energy of all steps, with every device at full power; None where it is not known."""
        return None if self.site.watts is None else kilowatt_hours(self.seconds, self.site.watts)

    def at(
        self,
        *,
        usd_per_hour: float | None = None,
        watts: float | None = None,
        mtbf_hours: float | None = None,
        restart_minutes: float | None = None,
    ) -> "Plan":
        """The plan at another price or power per device, or with another failure rate of all devices; None keeps the
        site's."""
        site, n = self.site, self.site.n_devices
        changed = replace(
            site,
            usd_per_hour=site.usd_per_hour if usd_per_hour is None else n * usd_per_hour,
            offer=site.offer if usd_per_hour is None else None,
            watts=site.watts if watts is None else n * watts,
            mtbf_hours=site.mtbf_hours if mtbf_hours is None else mtbf_hours,
            restart_minutes=site.restart_minutes if restart_minutes is None else restart_minutes,
        )
        layout = self.layout and replace(self.layout, site=changed)
        return replace(self, site=changed, layout=layout)

    @property
    def mfu(self) -> float:
        return self.mfu_of(self.seconds_per_step)

    @property
    def flops_by_phase(self) -> dict[str, int]:
        """FLOPs of a step, recomputation among them as a phase of its own."""
        return self.ledger.flops_by("phase")

    def mfu_of(self, seconds: float) -> float:
        """Model-FLOPs utilisation of a step that takes `seconds`."""
        if self.layout is not None:
            return self.layout.model_flops / seconds / (self.site.n_devices * self.site.matmul_peak)
        return mfu(self.ledger, seconds, self.site.matmul_peak)

    def _summary(self) -> str:
        verdict = "it fits" if self.fits else "it does not fit"
        memory = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.site.memory_bytes)} per device"
        return f"Plan for {self.site.name}: {verdict}, {memory}, {format_seconds(self.seconds)}"

    def __repr__(self) -> str:
        return f"{self._summary()}\n{self.table()!r}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._summary())}</p>{self.table()._repr_html_()}"

    def table(self) -> QuantityTable:
        """Rule and count side by side; `reconcile` adds the meter. FLOPs and bytes are per device."""
        return QuantityTable([*self._counted_rows(), *self._stored_rows(), *self._priced_rows()])

    def _counted_rows(self) -> Iterator[QuantityRow]:
        """Parameters, FLOPs and bytes of one device."""
        ledger = self.ledger
        note = f"rule {parameters_formula(self.recipe.model)}: no norms, no biases"
        yield QuantityRow("parameters", "count", self.rule_parameters, ledger.parameters, note=note)
        note = (
            "rule 6·N·T for the parameters that a token is multiplied with, and attention over all pairs, "
            f"{ledger.attention_flops / max(1, ledger.flops):.1%} of count; "
            f"causal pairs alone: {format_flops(ledger.causal_flops)} in all; elementwise work is apart: "
            f"{format_flops(ledger.elementwise_flops)}, one per element"
        )
        yield QuantityRow("FLOPs per step", "FLOP", self.rule_flops, ledger.flops, note=note)
        narrower = 2 * (4 - self.resolved.precision.bytes_per_weight)
        per_parameter = bytes_per_parameter(self.recipe.optimizer.name) - narrower
        parts = self.site.n_devices if self.resolved.strategy == "fsdp" else 1
        among = f", divided among {parts} devices" if parts > 1 else ""
        note = f"rule {per_parameter} bytes per parameter{among}: no activations, no logits, no batch"
        rule = int(adamw_bytes_rule(self.rule_parameters, bytes_per_parameter=per_parameter)) // parts
        yield QuantityRow("peak bytes", "bytes", rule, self.memory.peak_bytes, note=note)
        if (reserved := self.memory.reserved_bytes) is not None:
            note = "the caching allocator's segments, gaps included; it returns free ones before it "
            yield QuantityRow("reserved bytes", "bytes", None, reserved, note=f"{note}fails")

        if self.graph_bytes:
            note = "the pool of a CUDA graph stays reserved, beside steps that are computed without it"
            yield QuantityRow("bytes of the graph", "bytes", None, self.graph_bytes, note=note)

    def _stored_rows(self) -> Iterator[QuantityRow]:
        """The bytes that a run of adapters writes to the disk: frozen weights once, and checkpoints of what is
        trained."""
        adapter = adapter_of(self.recipe)
        if adapter is None:
            return
        precision, optimizer, model = self.resolved.precision, self.recipe.optimizer, self.recipe.model
        narrow = held_dtype(adapter.kind, adapter.frozen, precision.name) is not None
        each = 2 if narrow else precision.bytes_per_weight
        note = f"kept once in the run's folder; rule {each} bytes per parameter"
        yield QuantityRow(FROZEN_BYTES, "bytes", each * self.rule_parameters, self.ledger.frozen_bytes, note=note)
        matrices = {matrix for name in adapter.modules for matrix in adapted_matrices(name)}
        in_blocks = 2 * adapter.rank * model.d_model * model.n_layers * len(matrices - {"head"})
        in_head = adapter.rank * (model.d_model + model.vocab_size) * ("head" in matrices)
        # A checkpoint has no gradients.
        each = bytes_per_parameter(optimizer.name) - 4 + (4 if optimizer.average_decay else 0)
        note = f"of tensors, without their names; rule {each} bytes per parameter, of 2·r·d per matrix, as if square"
        rule = each * (in_blocks + in_head)
        yield QuantityRow(CHECKPOINT_BYTES, "bytes", rule, checkpoint_bytes(self.ledger), note=note)

    def _priced_rows(self) -> Iterator[QuantityRow]:
        """Seconds, what they cost, and the loss that they lead to."""
        site, price = self.site, self.price
        if self.compile_estimate.chosen:
            peak = "; the peak is that of the uncompiled step" if self.compiled is None else ""
            note = f"once per run, not in its steps{peak}"
            yield QuantityRow("seconds to compile", "seconds", None, self.compile_estimate.seconds, note=note)
        how = "each operator alone, on this machine" if site.measured else "each operator's roofline"
        if price.disturbed:
            how += ", measured while it was busy: at most, without other processes"
        note = (
            f"rule: MFU {RULE_MFU}; count: {how}, within a factor of {price.factor:.2f} in nine cases of ten; "
            f"{price.byte_bound_share:.0%} of the time bound by bytes"
        )
        rule = seconds_rule(self.rule_flops, site.matmul_peak, mfu=RULE_MFU)
        yield QuantityRow("seconds per step", "seconds", rule, self.seconds_per_step, note=note)
        peak = "measured on this machine" if site.measured else "of the datasheet, dense"
        peak += ", while it was busy" if site.disturbed else ""
        precision = self.resolved.precision
        in_format = f" in {precision.products}" if precision.name in NARROW else ""
        note = f"of the matmul peak{in_format} {peak}; full attention, no recomputation"
        yield QuantityRow("MFU", "share", RULE_MFU, self.mfu, note=note)
        tokens = format_count(self.steps * self.tokens_per_step)
        note = f"{self.steps:,} steps, {tokens} tokens; the meter includes evaluations and checkpoints"
        yield QuantityRow("seconds in all", "seconds", self.rule_seconds, self.seconds, note=note)
        if site.usd_per_hour is not None:
            offer = f"price: {site.offer}" if site.offer else "the price that was given"
            note, rule = (
                f"{offer}; ${site.usd_per_hour:.2f} per hour in all",
                dollars(self.rule_seconds, site.usd_per_hour),
            )
            yield QuantityRow("dollars", "USD", rule, self.dollars, note=note)
        if site.watts is not None:
            note, rule = f"{site.watts:,.0f} W in all, the boards alone", kilowatt_hours(self.rule_seconds, site.watts)
            yield QuantityRow("energy", "kWh", rule, self.kilowatt_hours, note=note)
        if (predicted := self.predicted_loss) is not None:
            times = format_three_digits(predicted.extrapolation)
            note = (
                f"nats per token, count: the law {predicted.law}, 90% interval {predicted.low:.4f} to "
                f"{predicted.high:.4f}, at {times} times the FLOPs of its largest run"
            )
            yield QuantityRow("validation loss", "nats", None, predicted.loss, note=note)
