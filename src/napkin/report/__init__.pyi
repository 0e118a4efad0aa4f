from .headline import reconcile_table as reconcile_table
from .page import write_report as write_report
from .stages import StagePage as StagePage
from .stages import write_stages as write_stages
from .timeline_picture import timeline_svg as timeline_svg
