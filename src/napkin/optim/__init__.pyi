from .adamw import AdamW as AdamW
from .clipping import clip_gradients as clip_gradients
from .parameter_groups import decay_groups as decay_groups
from .schedule import warmup_cosine as warmup_cosine
