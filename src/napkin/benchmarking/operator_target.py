"""An operator of napkin.kernels as something to be timed."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.ledger import Ledger
from napkin.benchmarking.case import Case, Target
from napkin.benchmarking.operators import OPERATORS
from napkin.benchmarking.shapes import Shape
from napkin.benchmarking.subject import Draw, Operation, Subject, count_passes
from napkin.kernels.triton.usable import triton_is_installed
from napkin.recipe.precision import Precision
from napkin.torch_compile import set_up_compiler


class OperatorTarget(Target):
    """One operator of the table."""

    def __init__(self, name: str, device_type: str) -> None:
        self.operator = OPERATORS[name]
        self.passes = ("forward", "backward", "both")
        self.dimensions = (*self.operator.sizes, *self.operator.optional)
        missing: frozenset[str] = frozenset()
        if device_type != "cuda":
            missing |= self.operator.on_gpu_only
        if device_type != "cuda" or not triton_is_installed():
            missing |= self.operator.with_triton_only
        self.forms = [form for form in self.operator.forms if form not in missing]
        self.shapes, self.sweep = self.operator.shapes, self.operator.sweep

    def whole(self, shape: Shape) -> dict[str, int]:
        """A shape with the operator's own sizes for what it does not name."""
        return {**self.operator.sizes, **shape}

    def usual_forms(self, shape: Shape, precision: Precision) -> Sequence[str]:
        """All that the device has."""
        return self.forms

    def ledger(self, case: Case) -> Ledger:
        """Forward and backward pass."""
        with FakeTensorMode():
            form = self.operator.counted_as.get(case.form, case.form)
            subject = self._subject(replace(case, form=form), "cpu", compiled=False)
            return count_passes(subject, case.precision.device_type)

    def subject(self, case: Case) -> Subject:
        """The operator with inputs in the case's format."""
        return self._subject(case, case.precision.device_type, compiled=case.compiled)

    def _subject(self, case: Case, device_type: str, *, compiled: bool) -> Subject:
        form = self.operator.forms[case.form]
        if compiled:
            set_up_compiler()
            form = torch.compile(form, dynamic=False)
        draw = Draw(device_type, case.precision.products_dtype)
        return Subject(Operation(form), self.operator.inputs(case.shape, draw))
