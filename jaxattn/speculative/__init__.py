"""Speculative decoding: drafting, acceptance, and the loop that runs them on the device."""

from jaxattn.speculative.acceptance import Acceptance as Acceptance
from jaxattn.speculative.acceptance import accept_greedy as accept_greedy
from jaxattn.speculative.acceptance import accept_sampled as accept_sampled
from jaxattn.speculative.acceptance import rejection_walk as rejection_walk
from jaxattn.speculative.drafting import Candidates as Candidates
from jaxattn.speculative.drafting import DraftTree as DraftTree
from jaxattn.speculative.drafting import branch_parents as branch_parents
from jaxattn.speculative.drafting import draw_children as draw_children
from jaxattn.speculative.drafting import expand as expand
from jaxattn.speculative.drafting import keep_best as keep_best
from jaxattn.speculative.drafting import select_tree as select_tree
from jaxattn.speculative.ngram import propose as propose
from jaxattn.speculative.sampling import SamplingParams as SamplingParams
from jaxattn.speculative.sampling import draw as draw
from jaxattn.speculative.sampling import keys_at as keys_at
from jaxattn.speculative.sampling import probabilities as probabilities
