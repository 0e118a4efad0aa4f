from .choice import choice_score as choice_score
from .choice import chosen_letter as chosen_letter
from .exact import exact_score as exact_score
from .mathematics.final_answer import final_answer as final_answer
from .mathematics.math_answer import answers_equal as answers_equal
from .mathematics.math_answer import math_score as math_score
from .mathematics.math_answer import number_score as number_score
from .pattern import regex_score as regex_score
