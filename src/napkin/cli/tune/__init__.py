"""`napkin tune`, a group of commands."""

from napkin.cli.commands import Command, Group

COMMANDS = {
    "sft": Command("fine-tune a model on conversations: all weights, or adapters", "methods:sft_command"),
    "demo": Command("an arithmetic model from scratch: taught by a careless teacher, then by rewards", "demo"),
    "rl": Command("reinforcement learning: a model learns from rewards of its own answers", "methods:rl_command"),
    "preference": Command("learn from pairs of answers: DPO, IPO, KTO, ORPO, SimPO", "methods:preference_command"),
    "reward-model": Command(
        "learn which of two answers is better, as a number for each", "methods:reward_model_command"
    ),
}

main = Group(__name__, COMMANDS)
