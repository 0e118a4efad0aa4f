"""Mathematical answers, graded exactly and in bounded work.

Start with `math_answer.py`: the final answer of a text (`final_answer.py`) becomes tokens (`answer_tokens.py`), a tree
(`expression_parser.py`), and is compared with the reference (`equality.py`) by exact or 120-digit arithmetic
(`expression.py`, `evaluation.py`). Nothing of an answer is ever run as a program.
"""
