from .mathematics.math_answer import answers_equal as answers_equal
from .registry import REWARDS as REWARDS
from .registry import reward_named as reward_named
from .reward import Judgement as Judgement
from .reward import Reward as Reward
from .reward import RewardFailure as RewardFailure
