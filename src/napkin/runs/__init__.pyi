from .measurement_file import MeasurementFile as MeasurementFile
from .metrics import StepMetrics as StepMetrics
from .metrics import read_metrics as read_metrics
from .plan_file import PlanFile as PlanFile
from .run_folder import RunFolder as RunFolder
from .run_format import is_run as is_run
from .run_record import RunRecord as RunRecord
from .run_record import read_run_record as read_run_record
