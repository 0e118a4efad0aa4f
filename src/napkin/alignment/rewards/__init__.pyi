from .registry import REWARDS as REWARDS
from .registry import reward_named as reward_named
from .reward import Judgement as Judgement
from .reward import Reward as Reward
