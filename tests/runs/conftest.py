# Run folders as the report reads them.
from report.conftest import full_run as full_run
from report.conftest import plan as plan
from report.conftest import planned_run as planned_run
