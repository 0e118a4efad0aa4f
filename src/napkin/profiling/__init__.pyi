from .profile_page import write_profile_page as write_profile_page
from .profile_table import write_trace as write_trace
from .profiler import profile as profile
from .profiler import profile_recipe as profile_recipe
from .step_profile import Figures as Figures
from .step_profile import OutsideRow as OutsideRow
from .step_profile import ProfileRow as ProfileRow
from .step_profile import StepProfile as StepProfile
