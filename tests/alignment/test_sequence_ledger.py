"""A step on sequences is counted as it runs: the same operators, FLOPs and peak bytes."""

import pytest
import torch
from torch import Tensor, nn

from napkin.accounting.counting import count
from napkin.accounting.metering import METERED_STEP, meter_step
from napkin.alignment.objective import totals_of
from napkin.alignment.sequence_packing import SequenceMicroBatch, micro_batches_of
from napkin.alignment.supervised import SupervisedObjective
from napkin.distributed.micro_batches import PackedRows
from napkin.model.transformer import TokenScores
from oracles.alignment_cases import some_units, train_state_of
