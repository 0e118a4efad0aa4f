"""`napkin tune`: a group of commands, one file each."""

from napkin.cli.commands import run_group

COMMANDS = {
    "sft": "fine-tune a model on conversations: all weights, or adapters",
    "demo": "an arithmetic model from scratch: taught by a careless teacher, then by rewards",
    "rl": "reinforcement learning: a model learns from rewards of its own answers",
    "preference": "learn from pairs of answers: DPO, IPO, KTO, ORPO, SimPO",
    "reward-model": "learn which of two answers is better, as a number for each",
}


def main(arguments: list[str]) -> int:
    """Run one of the commands."""
    return run_group(__name__, COMMANDS, arguments)
