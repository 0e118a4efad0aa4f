import dataclasses

import numpy as np
import pytest

from napkin.model.config import ModelConfig
from napkin.model.published_models import preset
from napkin.planning.service_work import count_forward, count_work
from tests.oracles.tiny_models import *  # noqa: F403
